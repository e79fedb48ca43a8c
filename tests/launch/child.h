// SPDX-License-Identifier: Apache-2.0
// tests/launch/child.h: programs that a test starts, watches and signals.
#pragma once

#include <chrono>
#include <functional>
#include <string>
#include <vector>

#include "tests/support.h"

namespace lockstep::testing {

constexpr auto kPatience = std::chrono::seconds(60);  // for what should take a moment; sanitizers are slow

// Asks again until the answer is yes; false if that takes longer than `patience`.
bool wait_until(const std::function<bool()>& condition, std::chrono::milliseconds patience = kPatience);

bool is_running(int pid);  // not ended; a process that nobody has waited for yet has ended

int pid_in(const TempFolder& folder, const std::string& name);  // waits for the file; 0 if it does not come

// A program with its stdout and stderr in files. Killed, if it still runs, when this goes away.
class Child {
 public:
  explicit Child(const std::vector<std::string>& command);
  ~Child();
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;

  int pid() const { return pid_; }
  void signal(int number) const;
  int wait(std::chrono::milliseconds patience = kPatience);  // its exit code, or 128 + signal; -1 if it does not end
  std::string output() const;
  std::string error() const;

 private:
  bool has_ended();

  TempFolder folder_;
  int pid_ = -1;
  int exit_code_ = -1;
  bool ended_ = false;
};

// A program that is started and waited for, as Child::wait().
struct Ended {
  int exit_code;
  std::string output;
  std::string error;
};
Ended run(const std::vector<std::string>& command, std::chrono::milliseconds patience = kPatience);

}  // namespace lockstep::testing
