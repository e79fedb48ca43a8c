// SPDX-License-Identifier: Apache-2.0
// collective/calls/call_queue.h: makes the collectives of one rank one after the other, in the order in which they were given.
//
// Flow:    Transport::start, c10d backend -> here, on the thread that waits or on a worker thread -> shm::Group::run
// Owns:    calls that are not finished, and what they hold; one worker thread, once calls were handed to it
// Threads: any
// Ranks:   every rank gives the same calls in the same order; so all make them in that order, whichever they wait for
//
// Note [Deferred calls]
// add() only notes a call; the thread that waits for it makes it, and those before it. Backward keeps all cores of a
// machine busy: a second thread would take the time that it is meant to save, and its waiting for the other ranks on
// top (docs/design/exchange.md has the figures).
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

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <utility>

#include "lockstep/collective/calls/future.h"

namespace lockstep {

class CallQueue {
 public:
  using Body = std::function<void()>;

  explicit CallQueue(std::string here = {}) : here_(std::move(here)) {}  // this rank, for messages

  ~CallQueue() { close(); }
  CallQueue& operator=(CallQueue&&) = delete;

  // Appends a call. It begins when somebody waits for it or a later one, or after hand_to_worker().
  FuturePtr add(Body body);

  // From now on the worker thread makes the calls that were added so far. Does not block.
  void hand_to_worker();

  // Calls that did not begin never run: their futures throw PeerLost. A call under way has to end by itself.
  void close();

  // A turn of this thread: it begins after all calls that were added before it, which this thread makes too where the
  // worker has not begun them. While it lives, no other thread makes a call.
  class Turn {
   public:
    explicit Turn(CallQueue& queue);
    ~Turn();
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
  void drain();                               // returns once those that were handed to the worker are finished
  bool inside() const;                        // this thread is in one of the calls

 private:
  class Item;
  using ItemPtr = std::shared_ptr<Item>;
  using Lock = std::unique_lock<std::mutex>;

  bool busy() const { return runner_ != std::thread::id(); }
  void work();
  void run_front(Lock& lock);
  template <class Done>
  void run_until(Lock& lock, const Done& done);                              // makes calls, or waits for who makes them
  bool wait_until_done(const Item& item, std::optional<Deadline> deadline);  // without one, makes the calls before it

  std::string here_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<ItemPtr>
      items_;  // not begun; the first `handed_over_` of them are the worker's. Guarded by mutex_, as all
  std::size_t handed_over_ = 0;
  std::thread::id runner_;  // the thread that makes a call now, if any
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace lockstep
