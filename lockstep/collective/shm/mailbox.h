// SPDX-License-Identifier: Apache-2.0
// collective/shm/mailbox.h: send and receive between two ranks of a group.
//
// transfer.h says how a message travels. Here is who drives it: the caller, where no other message is under way, else a
// thread that takes a step of each in turn and sleeps while none can go on.
//
// Owns:    the transfers under way; one thread, once a transfer was started without blocking
// Threads: one at a time may call, also while another makes a collective; any may wait for what was started
// Ranks:   the two that are named; no order with respect to collectives
#pragma once

#include <condition_variable>
#include <exception>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "lockstep/collective/calls/call.h"
#include "lockstep/collective/calls/future.h"
#include "lockstep/collective/shm/group.h"
#include "lockstep/collective/shm/transfer.h"

namespace lockstep::shm {

class Mailbox final : public CallDescription {
 public:
  Mailbox(Group& group, milliseconds timeout);
  ~Mailbox();  // gives up what is under way

  void set_timeout(milliseconds timeout);

  int run(const Call& call);  // of a receive: returns who sent it
  FuturePtr start(const Call& call);
  void drain() const;  // returns once nothing is under way

  std::string here() const override;
  std::string everyone() const override { return group_.everyone(); }

 private:
  struct Item {
    Transfer transfer;
    std::shared_ptr<Completion> completion;
    Deadline deadline;
  };

  FuturePtr enqueue(Transfer transfer, milliseconds timeout);
  Flag& bell() const { return group_.area().progress(group_.rank()).bell; }
  int machine_rank_of(const Transfer& transfer) const;

  void work();
  bool begin_round();
  bool progress_all();
  bool step(Item& item);
  void fail_all(const std::exception_ptr& error);

  Group& group_;
  Waiter waiter_;
  int waiting_for_ = kNobody;
  IntVector<std::uint32_t> sent_;  // messages so far, to each rank
  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  std::list<Item> items_;  // in the order in which they were started
  std::string doing_;      // guarded by mutex_
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace lockstep::shm
