#include "lockstep/collective/shm/work.h"

#include "lockstep/error.h"

namespace lockstep::shm {
namespace {

std::exception_ptr dropped() {
  return std::make_exception_ptr(PeerLost({.what = "a group was closed before a call that was started could begin",
                                           .likely = "an error elsewhere, or a Work that nobody waited for",
                                           .next = "wait for every Work before the group goes"}));
}

}  // namespace

void WorkState::finish(std::exception_ptr failure) {
  const std::lock_guard lock(mutex);
  done = true;
  error = std::move(failure);
  changed.notify_all();
}

bool WorkState::finished() const {
  const std::lock_guard lock(mutex);
  return done;
}

bool WorkState::wait(const Deadline* deadline) const {
  std::unique_lock lock(mutex);
  const auto is_done = [this] { return done; };
  if (deadline == nullptr)
    changed.wait(lock, is_done);
  else if (!changed.wait_for(lock, deadline->left(), is_done))
    return false;
  if (error) std::rethrow_exception(error);
  return true;
}

Worker::~Worker() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
    changed_.notify_all();
  }
  if (thread_.joinable()) thread_.join();
  for (const Item& item : items_) item.state->finish(dropped());
}

std::shared_ptr<WorkState> Worker::start(Task task) {
  const std::lock_guard lock(mutex_);
  auto state = std::make_shared<WorkState>();
  items_.push_back({std::move(task), state});
  if (!thread_.joinable()) thread_ = std::thread([this] { work(); });
  changed_.notify_all();
  return state;
}

bool Worker::idle() const {
  const std::lock_guard lock(mutex_);
  return items_.empty();
}

void Worker::drain() const {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return items_.empty(); });
}

void Worker::work() {
  Item item;
  while (take(item)) {
    std::exception_ptr error;
    try {
      item.task();
    } catch (...) {
      error = std::current_exception();
    }
    item.task = {};  // what it holds, tensors for instance, is free once its state says so
    const std::lock_guard lock(mutex_);
    items_.pop_front();
    item.state->finish(error);
    changed_.notify_all();
  }
}

bool Worker::take(Item& item) {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return stopping_ || !items_.empty(); });
  if (stopping_) return false;
  item = items_.front();
  return true;
}

}  // namespace lockstep::shm
