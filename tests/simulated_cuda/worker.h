// SPDX-License-Identifier: Apache-2.0
// tests/simulated_cuda/worker.h: a thread that does one thing after the other.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <future>
#include <mutex>
#include <thread>

namespace simulated_cuda {

class Worker {
 public:
  Worker() : thread_([this] { serve(); }) {}
  ~Worker() {  // after what is still to be done
    put({});
    thread_.join();
  }
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  std::shared_future<void> run(std::function<void()> task) {
    std::packaged_task<void()> packaged(std::move(task));
    std::shared_future<void> result = packaged.get_future().share();
    put(std::move(packaged));
    return result;
  }

 private:
  void put(std::packaged_task<void()> task) {
    const std::lock_guard lock(mutex_);
    tasks_.push_back(std::move(task));
    changed_.notify_one();
  }

  void serve() {
    for (;;) {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [this] { return !tasks_.empty(); });
      std::packaged_task<void()> task = std::move(tasks_.front());
      tasks_.pop_front();
      lock.unlock();
      if (!task.valid()) return;
      task();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::packaged_task<void()>> tasks_;
  std::thread thread_;
};

}  // namespace simulated_cuda
