// SPDX-License-Identifier: Apache-2.0
#include "agent/meet/job_secret.h"

#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>

#include "lockstep/base/files/file.h"
#include "tests/support.h"

namespace lockstep {
namespace {

using testing::contains;
using testing::message_of;

const std::string kHex = "00112233445566778899aabbccddeeffABCDEF00112233445566778899aabbcc";

struct JobsSecret : ::testing::Test {
  JobsSecret() : home_before(std::getenv("HOME") != nullptr ? std::getenv("HOME") : "/") {
    ::setenv("HOME", home.path().c_str(), 1);
    ::setenv("LOCKSTEP_MUNGE", "0", 1);  // there is a test of it in tests/security/munge_test.sh
  }
  ~JobsSecret() override {
    ::setenv("HOME", home_before.c_str(), 1);
    for (const char* name : {"LOCKSTEP_SECRET", "LOCKSTEP_SECRET_FILE", "LOCKSTEP_INSECURE_NETWORK", "LOCKSTEP_MUNGE"})
      ::unsetenv(name);
  }
  static std::string error() {
    return message_of<EnvironmentError>([] { JobSecret("a job", false); });
  }
  testing::TempFolder home;
  std::string home_before;
};

TEST_F(JobsSecret, in_the_environment) {
  ::setenv("LOCKSTEP_SECRET", kHex.c_str(), 1);
  const auto secret = JobSecret("a job", false).find();
  ASSERT_TRUE(secret);
  EXPECT_EQ((*secret)[1], 0x11);
  EXPECT_EQ((*secret)[31], 0xcc);
}

TEST_F(JobsSecret, an_invalid_one_is_an_error_that_does_not_show_it) {
  for (const std::string& wrong : {kHex.substr(2), kHex + "0", "g" + kHex.substr(1), std::string()}) {
    ::setenv("LOCKSTEP_SECRET", wrong.c_str(), 1);
    EXPECT_TRUE(contains(error(), "LOCKSTEP_SECRET is not 64 hexadecimal digits"));
    EXPECT_EQ(error().find("8899aa"), std::string::npos);
  }
}

TEST_F(JobsSecret, in_a_file_that_only_this_user_can_read) {
  const std::string path = home.file("secret");
  write_file(path, kHex + "\n");
  ::setenv("LOCKSTEP_SECRET_FILE", path.c_str(), 1);
  ::chmod(path.c_str(), 0640);
  EXPECT_TRUE(contains(error(), "other users can access the file"));
  ::chmod(path.c_str(), 0600);
  EXPECT_TRUE(JobSecret("a job", false).find());
  write_file(path, kHex + kHex);  // a new file, with the modes of one
  ::chmod(path.c_str(), 0600);
  EXPECT_TRUE(contains(error(), "does not hold 64 hexadecimal digits"));
  ::setenv("LOCKSTEP_SECRET_FILE", home.file("none").c_str(), 1);
  EXPECT_TRUE(contains(error(), "can't read LOCKSTEP_SECRET_FILE: No such file"));
  EXPECT_TRUE(contains(error(), "openssl rand -hex 32"));
}

TEST_F(JobsSecret, in_memory_that_children_can_read_and_no_environment_shows) {
  const std::string digits = make_secret();
  EXPECT_NE(digits, make_secret());
  ::setenv("LOCKSTEP_SECRET", digits.c_str(), 1);
  const UniqueFd memory = tell_in_memory();
  EXPECT_EQ(std::getenv("LOCKSTEP_SECRET"), nullptr);
  const auto secret = JobSecret("a job", false).find();
  ASSERT_TRUE(secret);
  const pid_t child = ::fork();
  if (child == 0) ::_exit(JobSecret("a job", false).find() == secret ? 0 : 1);
  int status = -1;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  ::setenv("LOCKSTEP_SECRET", digits.c_str(), 1);
  EXPECT_EQ(JobSecret("a job", false).find(), secret);
}

TEST_F(JobsSecret, in_the_home_where_rank_0_puts_one_for_each_job) {
  const JobSecret other("a job", false);
  EXPECT_FALSE(other.find());
  {
    const JobSecret first("a job", true), of_another_job("another job", true);
    ASSERT_TRUE(first.find());
    EXPECT_EQ(first.find(), other.find());
    EXPECT_NE(first.find(), of_another_job.find());
    for (const auto& entry : std::filesystem::directory_iterator(home / ".lockstep"))
      EXPECT_EQ(entry.status().permissions() & std::filesystem::perms::mask, std::filesystem::perms(0600));
  }
  EXPECT_FALSE(other.find()) << "gone with the job";
}

TEST_F(JobsSecret, told_only_where_it_is_not_in_the_home) {
  EXPECT_FALSE(is_secret_told());
  ::setenv("LOCKSTEP_SECRET", kHex.c_str(), 1);
  EXPECT_TRUE(is_secret_told());
}

TEST_F(JobsSecret, without_a_home_is_an_error_with_the_ways_to_one) {
  ::setenv("HOME", home.file("none/at all").c_str(), 1);
  const std::string message = message_of<EnvironmentError>([] { JobSecret("a job", true); });
  for (const char* way : {"export LOCKSTEP_SECRET=", "LOCKSTEP_SECRET_FILE", "munged", "one home, for all machines"})
    EXPECT_TRUE(contains(message, way));
  EXPECT_FALSE(JobSecret("a job", false).find());
}

TEST_F(JobsSecret, nowhere_in_a_network_that_is_trusted) {
  ::setenv("LOCKSTEP_INSECURE_NETWORK", "1", 1);
  EXPECT_TRUE(JobSecret("a job", true).is_off());
  EXPECT_FALSE(home.has(".lockstep"));
}

}  // namespace
}  // namespace lockstep
