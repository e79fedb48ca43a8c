// SPDX-License-Identifier: Apache-2.0
#include "agent/start/process.h"

#include <gtest/gtest.h>
#include <poll.h>
#include <pthread.h>

#include "lockstep/error.h"
#include "tests/launch/child.h"

namespace lockstep {
namespace {

ExitStatus end_of(const Process& process) {
  pollfd ended{.fd = process.pidfd(), .events = POLLIN, .revents = 0};
  ::poll(&ended, 1, 20000);
  return process.status().value();
}

ExitStatus end_of_body(const std::function<int()>& body) {
  ProcessOptions options;
  options.body = body;
  return end_of(Process(options));
}

TEST(Process, reports_how_its_child_ended) {
  ProcessOptions options;
  options.command = {"sh", "-c", "exit 7"};
  EXPECT_EQ(end_of(Process(options)).exit_code, 7);
  options.command = {"sh", "-c", "kill -9 $$"};
  EXPECT_EQ(end_of(Process(options)).signal, SIGKILL);
}

TEST(Process, gives_its_child_variables_cores_and_an_empty_stdin) {
  ProcessOptions options;
  options.variables = {{"LOCKSTEP_TEST", "a b"}};
  options.cores = {usable_cores().back()};
  options.body = [&options] {
    const bool right = std::getenv("LOCKSTEP_TEST") == std::string("a b") && usable_cores() == options.cores;
    char byte = 0;
    return right && ::read(STDIN_FILENO, &byte, 1) == 0 ? 0 : 1;
  };
  EXPECT_EQ(end_of(Process(options)).exit_code, 0);
  EXPECT_EQ(std::getenv("LOCKSTEP_TEST"), nullptr);
}

TEST(Process, a_body_ends_the_child_with_its_result_or_its_exception) {
  EXPECT_EQ(end_of_body([] { return 3; }).exit_code, 3);
  EXPECT_EQ(end_of_body([]() -> int { throw UsageError({.what = "expected in this test"}); }).exit_code, 2);
  EXPECT_EQ(end_of_body([]() -> int { throw std::runtime_error("expected in this test"); }).exit_code, 1);
}

TEST(Process, names_a_program_that_does_not_exist) {
  ProcessOptions options;
  options.command = {"no-such-program", "--help"};
  try {
    const Process process(options);
    FAIL() << "no error";
  } catch (const SystemError& error) {
    EXPECT_NE(std::string(error.what()).find("no-such-program"), std::string::npos) << error.what();
  }
}

// Set, a forked child hangs before it has begun anything, as one whose program's file can't be read.
bool child_hangs = false;

TEST(Process, gives_up_on_a_child_that_does_not_begin) {
  static const int registered = ::pthread_atfork(nullptr, nullptr, [] {
    while (child_hangs) ::pause();
  });
  ASSERT_EQ(registered, 0);
  ProcessOptions options;
  options.command = {"a-program"};
  options.start_timeout = std::chrono::milliseconds(100);
  child_hangs = true;
  const auto message = testing::message_of<SystemError>([&] { Process{options}; });
  child_hangs = false;
  EXPECT_TRUE(testing::contains(message, "a-program"));
  EXPECT_TRUE(testing::contains(message, "did not begin its program within 100.0 ms"));
}

TEST(Process, names_cores_that_do_not_exist) {
  ProcessOptions options;
  options.command = {"true"};
  options.cores = {1023};
  EXPECT_THROW(Process{options}, SystemError);
}

TEST(Process, kills_its_child_when_destroyed) {
  int pid = 0;
  {
    ProcessOptions options;
    options.body = []() -> int {
      for (;;) ::pause();
    };
    const Process process(options);
    pid = process.pid();
    EXPECT_FALSE(process.status());
  }
  EXPECT_FALSE(testing::is_running(pid));
}

}  // namespace
}  // namespace lockstep
