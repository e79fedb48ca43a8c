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

#include <list>
#include <thread>

#include "lockstep/collective/shm/transfer.h"

namespace lockstep::shm {

class Mailbox final : public CallDescription {
 public:
  Mailbox(Group& group, milliseconds timeout)
      : group_(group), waiter_(group.peers(), group.machine_rank(group.rank()), *this, timeout), sent_(group.size()) {}

  // Gives up what is under way.
  ~Mailbox() {
    {
      const std::lock_guard lock(mutex_);
      stopping_ = true;
      if (!items_.empty()) waiter_.cancel();
      changed_.notify_all();
    }
    bell().ring();
    if (thread_.joinable()) thread_.join();
  }

  void set_timeout(milliseconds timeout) {
    drain();
    waiter_.set_timeout(timeout);
  }

  // Returns who sent what it received. Runs on the calling thread, unless others are under way that it must not
  // overtake.
  int run(const Call& call) {
    Transfer transfer(group_, call, sent_);
    std::unique_lock lock(mutex_);
    if (!items_.empty()) {
      lock.unlock();
      const FuturePtr future = enqueue(std::move(transfer), call.timeout);
      future->wait();
      return future->source();
    }
    doing_ = transfer.describe();
    lock.unlock();
    waiter_.begin_call(call.timeout);
    try {
      if (group_.peers().poisoned()) group_.peers().throw_if_poisoned(here());
      waiter_.until(bell(), machine_rank_of(transfer), [&] { return transfer.progress(); });
    } catch (...) {
      group_.after_failure();
      throw;
    }
    return transfer.source();
  }

  FuturePtr start(const Call& call) { return enqueue(Transfer(group_, call, sent_), call.timeout); }

  // Returns once nothing is under way.
  void drain() const {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return items_.empty(); });
  }

  std::string here() const override {
    const std::lock_guard lock(mutex_);
    return concat(group_.self(), " in ", doing_);
  }
  std::string everyone() const override { return group_.everyone(); }

 private:
  struct Item {
    Transfer transfer;
    std::shared_ptr<Completion> completion;
    Deadline deadline;
  };

  FuturePtr enqueue(Transfer transfer, milliseconds timeout) {
    auto completion = std::make_shared<Completion>();
    {
      const std::lock_guard lock(mutex_);
      items_.push_back(
          {std::move(transfer), completion, Deadline::after(timeout.count() > 0 ? timeout : waiter_.timeout())});
      if (!thread_.joinable()) thread_ = std::thread([this] { work(); });
      changed_.notify_all();
    }
    bell().ring();
    return completion;
  }
  Flag& bell() const { return group_.area().progress(group_.rank()).bell; }

  int machine_rank_of(const Transfer& transfer) const {
    return transfer.peer() == kAnyRank ? kNobody : group_.machine_rank(transfer.peer());
  }

  // Rounds of one step of each transfer. `rung` is read before the round: a bell that a peer rings during the round
  // ends the sleep after it, so no progress is missed.
  void work() {
    while (begin_round()) {
      try {
        if (group_.peers().poisoned()) group_.peers().throw_if_poisoned(here());
        const uint32_t rung = bell().load();
        if (progress_all()) continue;
        waiter_.until(bell(), waiting_for_, [&] { return bell().load() != rung; });
      } catch (...) {
        group_.after_failure();
        fail_all(std::current_exception());
      }
    }
  }

  // Sleeps until there is something to do; false once the mailbox is closed and empty.
  bool begin_round() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return stopping_ || !items_.empty(); });
    if (items_.empty()) return false;
    const Item& oldest = items_.front();
    doing_ = oldest.transfer.describe();
    waiting_for_ = machine_rank_of(oldest.transfer);
    waiter_.begin_call(oldest.deadline);
    return true;
  }

  // One step of each transfer; true if any is done.
  bool progress_all() {
    std::vector<Item*> items;
    {
      const std::lock_guard lock(mutex_);
      for (Item& item : items_) items.push_back(&item);
    }
    std::vector<const Transfer*> unfinished;
    bool any = false;
    for (Item* const item : items) {
      const bool must_wait = std::ranges::any_of(unfinished, [&](auto* one) { return one->holds_up(item->transfer); });
      if (!must_wait && step(*item))
        any = true;
      else
        unfinished.push_back(&item->transfer);
    }
    const std::lock_guard lock(mutex_);
    items_.remove_if([](const Item& item) { return item.completion->done(); });
    changed_.notify_all();
    return any;
  }

  // A disagreement ends the one transfer; anything else ends all.
  bool step(Item& item) {
    try {
      if (!item.transfer.progress()) return false;
      item.completion->complete(nullptr, item.transfer.source());
    } catch (const MismatchError&) {
      item.completion->complete(std::current_exception());
    }
    return true;
  }

  void fail_all(const std::exception_ptr& error) {
    const std::lock_guard lock(mutex_);
    for (const Item& item : items_) item.completion->complete(error);
    items_.clear();
    changed_.notify_all();
  }

  Group& group_;
  Waiter waiter_;
  int waiting_for_ = kNobody;
  IntVector<uint32_t> sent_;  // messages so far, to each rank
  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  std::list<Item> items_;  // in the order in which they were started
  std::string doing_;      // guarded by mutex_
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace lockstep::shm
