// collective/c10d/backend_queue.h: the collectives of a backend, one after the other.
//
// Flow:    shm_backend.cc -> here, on a thread of its own or on the caller's -> collective/shm/group.h
// Owns:    a thread, once something was to be run later
// Threads: any
// Ranks:   every rank gives the same tasks in the same order
//
// A task completes a future, and that runs the callbacks of the future (`then`) on the task's thread, before the task
// ends. Such a callback may make collectives and wait for them, as hooks of DDP do (PowerSGD, quantization): a task
// that is given out of a task, on its thread, is run there at once, in the middle of the other, whether it was to be
// run now or later. So it is done, and its own future completed, before a callback can wait for it, however deep they
// nest.
//
// Why not callbacks on a thread of their own: then a callback's collective and the next one of the program would reach
// the queue in an order that is a race on every rank, and ranks have to agree on it. Here a callback's collectives
// always come between the one that it belongs to and the next; also on a rank where that one was done before `then` was
// called and the callback is run by the thread that calls `then`, if it does so before it starts the next, as DDP's
// hooks do. A second thread would also be blocked by the first callback that waits, and who completes the next needs a
// third.
//
// The price: other threads' collectives wait while a callback runs, so a callback that waits for one never ends.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>

namespace lockstep::backend {

// Tasks in the order in which they are given, on a thread of its own or on that of a caller who waits anyway.
class Queue {
 public:
  using Task = std::function<void()>;  // throws nothing

  ~Queue() {  // not out of a task
    drain();
    {
      const std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    changed_.notify_all();
    if (thread_.joinable()) thread_.join();
  }

  void run_later(Task task) {
    if (inside()) return task();
    {
      const std::lock_guard lock(mutex_);
      tasks_.push_back(std::move(task));
      if (!thread_.joinable()) thread_ = std::thread([this] { work(); });
    }
    changed_.notify_all();
  }

  // After everything that was given before; returns once it is done.
  void run_now(const Task& task) {
    if (inside()) return task();
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return tasks_.empty() && !busy(); });
    run_unlocked(task, lock);
  }

  void drain() {
    run_now([] {});
  }

  // The caller is part of a task: a callback of the future that the task completes.
  bool inside() const {
    const std::lock_guard lock(mutex_);
    return busy_ == std::this_thread::get_id();
  }

 private:
  void work() {
    std::unique_lock lock(mutex_);
    while (true) {
      changed_.wait(lock, [this] { return stopping_ || (!tasks_.empty() && !busy()); });
      if (stopping_) return;
      Task task = std::move(tasks_.front());
      tasks_.pop_front();
      run_unlocked(task, lock);
    }
  }

  void run_unlocked(const Task& task, std::unique_lock<std::mutex>& lock) {
    busy_ = std::this_thread::get_id();
    lock.unlock();
    task();
    lock.lock();
    busy_ = {};
    changed_.notify_all();
  }

  bool busy() const { return busy_ != std::thread::id(); }

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Task> tasks_;
  std::thread::id busy_;  // whose task is under way, if any
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace lockstep::backend
