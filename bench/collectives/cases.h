// SPDX-License-Identifier: Apache-2.0
// bench/collectives/cases.h: what is measured, and how: the same for lockstep, Gloo and both MPIs, whose programs share
// this file and cases.cc. No torch, no lockstep: MPI's own compilers build it too.
//
// Flow:    bench_collectives -> a word per case, over a socket -> a process per system and rank -> seconds
// Ranks:   all ranks of a system measure the same cases in the same order
#pragma once

#include <cstddef>
#include <functional>
#include <string>
#include <vector>

namespace lockstep::bench {

// `bytes` of a case: what a rank gives to all_reduce, reduce, broadcast and send; the whole of p parts for all others.
struct Case {
  std::string operation = "all_reduce";
  size_t bytes = 4;
  std::string dtype = "float32";
  std::string memory = "ordinary";  // or "arena"; lockstep only, as is the algorithm
  std::string algorithm = "direct";

  size_t count() const;              // elements, at least one
  size_t part(size_t ranks) const;   // elements of one of `ranks` parts, at least one
  size_t whole(size_t ranks) const;  // elements of all parts
};

const std::vector<std::string>& operations();  // barrier, all_reduce, ... in the order of the table
const std::vector<std::string>& dtypes();

std::string to_word(const Case& one);  // "all_reduce:4096:float32:arena:direct"
Case from_word(const std::string& word);

// One rank of a system that can be measured.
class System {
 public:
  virtual ~System() = default;
  virtual int rank() const = 0;
  virtual std::function<void()> prepare(const Case& one) = 0;  // the call to measure; empty: this system has none
  virtual void barrier() = 0;
  virtual double slowest(double seconds) = 0;  // the maximum over all ranks
};

// send_receive: a message from rank 0 to 1 and back; other ranks do nothing.
std::function<void()> there_and_back(int rank, std::function<void()> send, std::function<void()> receive);

// Seconds per call: the median over rounds of the slowest rank's mean. A round takes about 10 ms, or one call.
double seconds_per_call(System& system, const std::function<void()>& call);

// Connects to the Unix socket at `address`, says its rank, and then answers each line, a word, with the seconds, or
// with "none" if the system has no such case. Returns when the other end closes. While it waits it sleeps.
void serve(System& system, const std::string& address);

}  // namespace lockstep::bench
