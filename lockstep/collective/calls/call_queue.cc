// SPDX-License-Identifier: Apache-2.0
#include "lockstep/collective/calls/call_queue.h"

#include <atomic>

#include "lockstep/error.h"

namespace lockstep {
namespace {

std::exception_ptr never_begun() {
  return std::make_exception_ptr(PeerLost({.what = "a world or group was closed before a started call could begin",
                                           .likely = "an error elsewhere, or a Work that was never waited for",
                                           .next = "wait for every Work before the world or group goes"}));
}

}  // namespace

class CallQueue::Item final : public Future {
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
    error_ = never_begun();
    finish();
  }
  void finish() { finished_.store(true, std::memory_order_release); }

 private:
  CallQueue& queue_;  // used until it is finished, which it is when the queue goes
  Body body_;
  std::exception_ptr error_;  // written before finished_
  std::atomic<bool> finished_{false};
};

void CallQueue::close() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
  for (const ItemPtr& item : std::exchange(items_, {})) item->drop();
  handed_over_ = 0;
}

FuturePtr CallQueue::add(Body body) {
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

void CallQueue::hand_to_worker() {
  {
    const std::lock_guard lock(mutex_);
    if (handed_over_ == items_.size()) return;
    if (!thread_.joinable()) thread_ = std::thread([this] { work(); });  // may throw: the calls stay deferred then
    handed_over_ = items_.size();
  }
  changed_.notify_all();
}

void CallQueue::drain() {
  Lock lock(mutex_);
  changed_.wait(lock, [this] { return handed_over_ == 0 && !busy(); });
}

bool CallQueue::inside() const {
  const std::lock_guard lock(mutex_);
  return runner_ == std::this_thread::get_id();
}

void CallQueue::work() {
  Lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return stopping_ || (handed_over_ > 0 && !busy()); });
    if (stopping_) return;
    run_front(lock);
  }
}

// Makes the first call. Others see `runner_` and leave the queue alone meanwhile, so the calls stay in order.
void CallQueue::run_front(Lock& lock) {
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

template <class Done>
void CallQueue::run_until(Lock& lock, const Done& done) {
  while (!done())
    if (busy())
      changed_.wait(lock);
    else
      run_front(lock);
}

bool CallQueue::wait_until_done(const Item& item, std::optional<Deadline> deadline) {
  const auto is_done = [&] { return item.finished(); };
  if (deadline) hand_to_worker();
  Lock lock(mutex_);
  if (deadline) return changed_.wait_for(lock, deadline->left(), is_done);
  run_until(lock, is_done);
  return true;
}

CallQueue::Turn::Turn(CallQueue& queue) : queue_(queue) {
  Lock lock(queue_.mutex_);
  nested_ = queue_.runner_ == std::this_thread::get_id();
  if (nested_) return;
  queue_.run_until(lock, [&] { return !queue_.busy() && queue_.items_.empty(); });
  queue_.runner_ = std::this_thread::get_id();
}

CallQueue::Turn::~Turn() {
  if (nested_) return;
  const std::lock_guard lock(queue_.mutex_);
  queue_.runner_ = {};
  queue_.changed_.notify_all();
}

}  // namespace lockstep
