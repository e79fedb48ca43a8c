// SPDX-License-Identifier: Apache-2.0
#include "agent/start/hosts.h"

#include "lockstep/base/files/file.h"
#include "tests/support.h"

namespace lockstep {
namespace {

using testing::contains;
using testing::message_of;
using Hosts = std::vector<Host>;

std::string error_of_hosts(const std::string& text) {
  return message_of<UsageError>([&] { read_hosts(text); });
}

TEST(Hosts, are_a_list_with_or_without_slots) {
  EXPECT_EQ(read_hosts("a:4,me@b-1.example,10.0.0.2:1"), (Hosts{{"a", "4"}, {"me@b-1.example"}, {"10.0.0.2", "1"}}));
}

TEST(Hosts, are_a_file_with_comments) {
  const testing::TempFolder folder;
  const std::string file = folder.file("hosts");
  write_file(file, "# three\n\na slots=4\n  b\t# as many as the option says\r\nc   slots=65536#");
  EXPECT_EQ(read_hosts(file), (Hosts{{"a", "4"}, {"b"}, {"c", "65536"}}));
}

TEST(Hosts, name_what_is_wrong_in_a_list) {
  for (const std::string wrong : {"", "a:0", "a:", "a:4:4", "a:100000", "a:-1", "-oProxyCommand=x", "/no/file", "a b"})
    for (const std::string& text : {wrong, "first:2," + wrong}) {
      const std::string message = error_of_hosts(text);
      EXPECT_TRUE(contains(message, "'" + wrong + "' is not a host"));
      EXPECT_TRUE(contains(message, "--hosts " + text));
    }
  EXPECT_TRUE(contains(error_of_hosts("a:4,b,a"), "host a is there twice"));
}

TEST(Hosts, name_file_and_line_of_what_is_wrong_in_a_file) {
  const testing::TempFolder folder;
  const std::string file = folder.file("hosts");
  for (const std::string wrong :
       {"slots=4", "b:4", "b 4", "b slots=x", "b slots=0", "b slots = 4", "b slots=4 c", "-b"}) {
    write_file(file, "a slots=2\n# b\n" + wrong + "\n");
    const std::string message = error_of_hosts(file);
    EXPECT_TRUE(contains(message, "'" + wrong + "' is not a host"));
    EXPECT_TRUE(contains(message, file + ", line 3"));
  }
  write_file(file, "a\nb\na slots=2\n");
  EXPECT_TRUE(contains(error_of_hosts(file), "host a is there twice\n  here:   " + file + ", line 3"));
  write_file(file, "# none\n");
  EXPECT_TRUE(contains(error_of_hosts(file), "no host"));
}

}  // namespace
}  // namespace lockstep
