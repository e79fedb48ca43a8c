// SPDX-License-Identifier: Apache-2.0
// launch/arbiter.h: who decides which half of a job's machines goes on when a network is cut in the middle.
//
// Flow:    machines.h, in a process of its own -> here -> etcd, or Slurm's controller
// Threads: one
//
// It is a voter as the machines are (agreement.h), asked only by exactly half of an even number of them.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "lockstep/launch/endpoint.h"

namespace lockstep {

struct ArbiterQuestion {
  std::string job;                // which no other job has
  std::string request;            // of agreement.h
  std::vector<std::string> here;  // hosts of this half
  std::vector<std::string> lost;  // of the other one
};

class Arbiter {
 public:
  virtual ~Arbiter() = default;

  // Blocks for some seconds at most. "": no word now.
  virtual std::string answer(const ArbiterQuestion& question) = 0;
};

// "etcd:HOST:PORT[,HOST:PORT...]" or "slurm". Null: none was asked for. Throws UsageError: another one.
std::shared_ptr<Arbiter> make_arbiter(const std::string& name);
std::shared_ptr<Arbiter> etcd_arbiter(std::vector<Endpoint> servers);

}  // namespace lockstep
