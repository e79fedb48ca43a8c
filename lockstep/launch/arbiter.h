// SPDX-License-Identifier: Apache-2.0
// launch/arbiter.h: who decides which half of a job's machines goes on when a network is cut in the middle.
//
// Flow:    machines.h, in a process of its own -> here -> etcd
// Threads: one
//
// It is a voter as the machines are (agreement.h), asked only by exactly half of an even number of them.
#pragma once

#include <memory>
#include <string>

namespace lockstep {

class Arbiter {
 public:
  virtual ~Arbiter() = default;

  // `job`: which no other job has. `request`: of agreement.h. Blocks for some seconds at most. "": no word now.
  virtual std::string answer(const std::string& job, const std::string& request) = 0;
};

// "etcd:HOST:PORT[,HOST:PORT...]". Null: none was asked for. Throws UsageError: another one.
std::shared_ptr<Arbiter> make_arbiter(const std::string& name);

}  // namespace lockstep
