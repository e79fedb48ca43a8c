// collective/shm_backend_queue.h: the collectives of a backend, one after the other.
//
// Flow:    shm_backend.cc -> here, on a thread of its own or on the caller's -> collective/shm/group.h
// Owns:    a thread, once something was to be run later
// Threads: any
// Ranks:   every rank gives the same tasks in the same order
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

  ~Queue() {
    drain();
    {
      const std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    changed_.notify_all();
    if (thread_.joinable()) thread_.join();
  }

  void run_later(Task task) {
    {
      const std::lock_guard lock(mutex_);
      tasks_.push_back(std::move(task));
      if (!thread_.joinable()) thread_ = std::thread([this] { work(); });
    }
    changed_.notify_all();
  }

  // After everything that was given before; returns once it is done.
  void run_now(const Task& task) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return tasks_.empty() && !busy_; });
    run_unlocked(task, lock);
  }

  void drain() {
    run_now([] {});
  }

 private:
  void work() {
    std::unique_lock lock(mutex_);
    while (true) {
      changed_.wait(lock, [this] { return stopping_ || (!tasks_.empty() && !busy_); });
      if (stopping_) return;
      Task task = std::move(tasks_.front());
      tasks_.pop_front();
      run_unlocked(task, lock);
    }
  }

  void run_unlocked(const Task& task, std::unique_lock<std::mutex>& lock) {
    busy_ = true;
    lock.unlock();
    task();
    lock.lock();
    busy_ = false;
    changed_.notify_all();
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Task> tasks_;
  bool busy_ = false;
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace lockstep::backend
