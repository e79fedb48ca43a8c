// SPDX-License-Identifier: Apache-2.0
#include "lockstep/base/files/file.h"

#include <gtest/gtest.h>

#include <iterator>

#include "lockstep/error.h"
#include "tests/launch/child.h"

namespace lockstep {
namespace {

using testing::TempFolder;

ptrdiff_t files_in(const TempFolder& folder) {
  return std::distance(std::filesystem::directory_iterator(folder.path()), std::filesystem::directory_iterator());
}

TEST(File, comes_back_as_it_was_written) {
  const TempFolder folder;
  const std::string content("a\0\n\xff", 4);
  write_file(folder.file("f"), content);
  EXPECT_EQ(read_file(folder.file("f")), content);
  write_file(folder.file("f"), "");
  EXPECT_EQ(read_file(folder.file("f")), "");
  EXPECT_EQ(files_in(folder), 1);
}

TEST(AtomicFile, without_commit_leaves_the_old_file) {
  const TempFolder folder;
  write_file(folder.file("f"), "old");
  {
    AtomicFile file(folder.file("f"));
    file.write("new", 3);
    EXPECT_EQ(read_file(folder.file("f")), "old");
  }
  EXPECT_EQ(read_file(folder.file("f")), "old");
  EXPECT_EQ(files_in(folder), 1);
}

TEST(File, errors_name_the_path) {
  for (const auto& action : {+[] { write_file("/no/such/folder", ""); }, +[] { read_file("/no/such/folder"); }}) try {
      action();
      FAIL() << "no error";
    } catch (const SystemError& error) {
      EXPECT_NE(std::string(error.what()).find("/no/such/folder"), std::string::npos) << error.what();
    }
}

TEST(File, a_folder_is_not_a_file) { EXPECT_THROW(read_file("/tmp"), SystemError); }

}  // namespace
}  // namespace lockstep
