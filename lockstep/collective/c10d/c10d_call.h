// collective/c10d/c10d_call.h: a call of a c10d backend as a Pending of ours.
//
// Flow:    gloo_messages.cc, nccl_transport.cc -> here -> Transport's callers
// Owns:    the c10d::Work, and a thread where a message goes on or is looked at without waiting for it
// Threads: one at a time
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <string>

#include "lockstep/collective/transport.h"

namespace lockstep {

using C10dWork = c10::intrusive_ptr<c10d::Work>;

// Calls `issue` while no other thread of this process does: c10d's flight recorder, one per process, notes each call in
// a map without a lock (2.11, FlightRecorder::recordWithResetEnabled), so that two worlds in two threads crash now and
// then.
C10dWork issue_alone(const std::function<C10dWork()>& issue);

struct C10dCall {
  const char* operation = "";         // "all_reduce"
  std::string here{};                 // this rank
  std::function<void()> finish = {};  // once the data is there, before wait() returns
};

// `issue` starts the call. A c10::Error that it throws at once is about the arguments: UsageError. All else is about
// a peer: PeerLost, at once or from wait().
std::shared_ptr<Pending> start_c10d(C10dCall call, const std::function<C10dWork()>& issue);

// A message over Gloo, in one or two transfers.
struct C10dMessage {
  C10dCall call{};
  std::function<C10dWork()> issue{};                  // starts the first one
  std::function<C10dWork(c10d::Work& first)> next{};  // once that one is done: the second one, or null. May throw
  bool in_background = false;                         // goes on also while nobody waits, for the price of a thread
};

// Messages over Gloo, which says whether one is done only to those who wait, and gives up one that nobody holds.
// Messages that are never waited for are held until this goes.
class C10dMessages {
 public:
  std::shared_ptr<Pending> start(C10dMessage message);

  // From any thread: ends the waits for all messages, also for those that are started later.
  void close();

 private:
  class UnderWay;
  std::mutex mutex_;
  bool closed_ = false;  // guarded by mutex_, like the next
  std::list<std::shared_ptr<UnderWay>> under_way_;
};

c10::intrusive_ptr<c10d::Store> with_prefix(const c10::intrusive_ptr<c10d::Store>& store, const std::string& prefix);

// What a transport of the sub-world of `ranks` is made with; `groups_made` tells the groups of one transport apart.
TransportOptions options_of_group(const TransportOptions& options, const std::vector<int>& ranks);
std::string prefix_of_group(int groups_made, const std::vector<int>& ranks);

}  // namespace lockstep
