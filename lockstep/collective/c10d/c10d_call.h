// SPDX-License-Identifier: Apache-2.0
// collective/c10d/c10d_call.h: a call of a c10d backend as a Future.
//
// Flow:    gloo_messages.cc, nccl_transport.cc -> here -> Transport's callers
// Owns:    the c10d::Work; a thread for each message that goes on in the background, is polled, or is waited for with a
//          deadline
// Threads: a call: one at a time. Messages: any
#pragma once

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <list>

#include "lockstep/collective/transport/transport.h"

namespace lockstep {

using C10dWork = c10::intrusive_ptr<c10d::Work>;

// Calls `issue` under a mutex of the process. c10d's flight recorder, one per process, adds each call to a map without a
// lock (2.11, FlightRecorder::recordWithResetEnabled): two worlds in two threads would crash now and then.
C10dWork issue_alone(const std::function<C10dWork()>& issue);

// What `cause` says of a connection whose other end is gone.
PeerLost lost_connection(const std::string& what, const std::string& here, const std::exception& cause);

struct C10dCall {
  std::string operation{};            // "all_reduce"
  std::string here{};                 // this rank
  std::function<void()> finish = {};  // once the data is there, before wait() returns
};

// `issue` starts the call. Throws UsageError where it throws a c10::Error at once, which is about the arguments. Any other
// failure is about a peer: PeerLost, at once or from wait().
FuturePtr start_c10d(C10dCall call, const std::function<C10dWork()>& issue);

// A message over Gloo: one transfer, or two in turn.
struct C10dMessage {
  C10dCall call{};
  std::function<C10dWork()> issue{};                  // starts the first one
  std::function<C10dWork(c10d::Work& first)> next{};  // after the first one: starts the second, or gives null
  bool in_background = false;                         // goes on also while nobody waits, for the price of a thread
};

// Messages under way. Gloo only tells a thread that waits whether a message is done, and drops a message that nobody
// holds: messages that are never waited for are held here, until the destructor.
class C10dMessages {
 public:
  FuturePtr start(C10dMessage message);

  // Fails all messages, also those that are started later. From any thread.
  void close();

 private:
  class UnderWay;
  std::mutex mutex_;
  bool closed_ = false;  // guarded by mutex_, like the next
  std::list<std::shared_ptr<UnderWay>> under_way_;
};

StorePtr with_prefix(const StorePtr& store, const std::string& prefix);

// Options and store prefix of a transport for the sub-world of `ranks`. `groups_made` numbers a transport's groups.
TransportOptions options_of_group(const TransportOptions& options, const std::vector<int>& ranks);
std::string prefix_of_group(int groups_made, const std::vector<int>& ranks);

}  // namespace lockstep
