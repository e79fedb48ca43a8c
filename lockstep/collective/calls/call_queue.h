// SPDX-License-Identifier: Apache-2.0
// collective/calls/call_queue.h: makes the collectives of one rank one after the other, in the order in which they were given.
//
// Flow:    Transport::start, c10d backend -> here, on the thread that waits or on a worker thread -> shm::Group::run
// Owns:    calls that are not finished, and what they hold; one worker thread, once calls were handed to it
// Threads: any
// Ranks:   every rank gives the same calls in the same order; so all make them in that order, whichever they wait for
//
// Note [Deferred calls]
// add() only notes a call; the thread that waits for it makes it, and those before it (docs/design/exchange.md says why).
//
// A thread that polls (done), waits for a limited time or turns to a message hands all deferred calls to the worker thread:
// otherwise two ranks could each wait for a call that the other one still defers.
//
// Note [Calls made by calls]
// A call of the c10d backend completes a future, which runs the callbacks attached to it on the thread of the call.
// Such a callback may make collectives and wait for them (DDP's PowerSGD and quantization hooks do): run() and add()
// out of a call make the new one at once, inside the other. So on every rank a callback's collectives come between the
// one that it belongs to and the next. If callbacks had a thread of their own, their order would be a race. The price:
// other threads' collectives wait while a callback runs, so a callback must not wait for one of those.
#pragma once

#include <atomic>
#include <deque>
#include <functional>
#include <thread>
#include <utility>

#include "lockstep/base/process/short_slices.h"
#include "lockstep/collective/calls/future.h"

namespace lockstep {

class CallQueue {
 public:
  using Body = std::function<void()>;

  explicit CallQueue(std::string here = {}) : here_(std::move(here)) {}  // this rank, for messages

  ~CallQueue() { close(); }
  CallQueue& operator=(CallQueue&&) = delete;

  // Appends a call. It begins when somebody waits for it or a later one, or after hand_to_worker().
  FuturePtr add(Body body) {
    auto item = std::make_shared<Item>(*this, std::move(body));
    if (inside()) {
      item->run();
      item->finish();
      return item;
    }
    const std::lock_guard lock(mutex_);
    items_.push_back(item);
    return item;
  }

  // From now on the worker thread makes the calls that were added so far. Does not block.
  void hand_to_worker() {
    {
      const std::lock_guard lock(mutex_);
      if (handed_over_ == items_.size()) return;
      if (!thread_.joinable()) thread_ = std::thread([this] { work(); });  // may throw: the calls stay deferred then
      handed_over_ = items_.size();
    }
    changed_.notify_all();
  }

  // Calls that did not begin never run: their futures throw PeerLost. A call under way has to end by itself.
  void close() {
    {
      const std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    changed_.notify_all();
    if (thread_.joinable()) thread_.join();
    for (const ItemPtr& item : std::exchange(items_, {})) item->drop();
    handed_over_ = 0;
  }

  // A turn of this thread: it begins after all calls that were added before it, which this thread makes too where the
  // worker has not begun them. While it lives, no other thread makes a call.
  class Turn {
   public:
    explicit Turn(CallQueue& queue) : queue_(queue) {
      Lock lock(queue_.mutex_);
      nested_ = queue_.runner_ == std::this_thread::get_id();
      if (nested_) return;
      queue_.run_until(lock, [&] { return !queue_.busy() && queue_.items_.empty(); });
      queue_.runner_ = std::this_thread::get_id();
    }

    ~Turn() {
      if (nested_) return;
      const std::lock_guard lock(queue_.mutex_);
      queue_.runner_ = {};
      queue_.changed_.notify_all();
    }
    Turn& operator=(Turn&&) = delete;

   private:
    CallQueue& queue_;
    bool nested_;
  };

  // Runs `body` in such a turn. Throws what `body` throws.
  template <class Function>
  void run(Function&& body) {
    const Turn turn(*this);
    body();
  }

  void run_all() { const Turn turn(*this); }  // that were added so far

  // Returns once those that were handed to the worker are finished.
  void drain() {
    Lock lock(mutex_);
    changed_.wait(lock, [this] { return handed_over_ == 0 && !busy(); });
  }

  // This thread is in one of the calls.
  bool inside() const {
    const std::lock_guard lock(mutex_);
    return runner_ == std::this_thread::get_id();
  }

 private:
  class Item final : public Future {
   public:
    Item(CallQueue& queue, Body body) : queue_(queue), body_(std::move(body)) {}

    void wait(std::optional<Deadline> deadline) override {
      if (!finished() && !queue_.wait_until_done(*this, deadline)) throw not_finished_by_deadline(queue_.here_);
      if (error_) std::rethrow_exception(error_);
    }
    bool done() override {
      if (!finished()) queue_.hand_to_worker();
      return finished();
    }

    bool finished() const { return finished_.load(std::memory_order_acquire); }

    void run() {
      try {
        body_();
      } catch (...) {
        error_ = std::current_exception();
      }
      body_ = {};  // what it holds, tensors for instance, is free before anybody sees that it is finished
    }
    void drop() {
      error_ =
          std::make_exception_ptr(PeerLost({.what = "a world or group was closed before a started call could begin",
                                            .likely = "an error elsewhere, or a Work that was never waited for",
                                            .next = "wait for every Work before the world or group goes"}));
      finish();
    }
    void finish() { finished_.store(true, std::memory_order_release); }

   private:
    CallQueue& queue_;  // used until it is finished, which it is when the queue goes
    Body body_;
    std::exception_ptr error_;  // written before finished_
    std::atomic<bool> finished_{false};
  };
  using ItemPtr = std::shared_ptr<Item>;
  using Lock = std::unique_lock<std::mutex>;

  bool busy() const { return runner_ != std::thread::id(); }

  void work() {
    ask_for_short_slices();
    Lock lock(mutex_);
    while (true) {
      changed_.wait(lock, [this] { return stopping_ || (handed_over_ > 0 && !busy()); });
      if (stopping_) return;
      run_front(lock);
    }
  }

  // Makes the first call. Others see `runner_` and leave the queue alone meanwhile, so the calls stay in order.
  void run_front(Lock& lock) {
    const ItemPtr item = std::move(items_.front());
    items_.pop_front();
    if (handed_over_ > 0) --handed_over_;
    runner_ = std::this_thread::get_id();
    lock.unlock();
    item->run();
    lock.lock();
    runner_ = {};
    item->finish();
    changed_.notify_all();
  }

  // Makes calls, or waits for who makes them.
  template <class Done>
  void run_until(Lock& lock, const Done& done) {
    while (!done())
      if (busy())
        changed_.wait(lock);
      else
        run_front(lock);
  }

  // Without a deadline, makes the calls before it.
  bool wait_until_done(const Item& item, std::optional<Deadline> deadline) {
    const auto is_done = [&] { return item.finished(); };
    if (deadline) hand_to_worker();
    Lock lock(mutex_);
    if (deadline) return changed_.wait_for(lock, deadline->left(), is_done);
    run_until(lock, is_done);
    return true;
  }

  std::string here_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<ItemPtr>
      items_;  // not begun; the first `handed_over_` of them are the worker's. Guarded by mutex_, as all
  size_t handed_over_ = 0;
  std::thread::id runner_;  // the thread that makes a call now, if any
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace lockstep
