// collective/shm/work.h: calls that were started and not waited for.
//
// Flow:    Group::start -> Worker (collectives, one after the other) or Mailbox (messages) -> Work::wait
// Owns:    Worker: one thread, started with the first call, joined by the destructor
// Threads: any may wait; one starts
// Ranks:   the calls of a Worker are made in the order in which they were started, like those of its peers
#pragma once

#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

#include "lockstep/deadline.h"

namespace lockstep::shm {

// What Work and the thread that does it share.
struct WorkState {
  void finish(std::exception_ptr failure = nullptr);
  bool finished() const;
  bool wait(const Deadline* deadline) const;  // false: the deadline passed

  mutable std::mutex mutex;
  mutable std::condition_variable changed;
  bool done = false;
  std::exception_ptr error;
  int source = -1;  // of a receive
};

class Worker {
 public:
  using Task = std::function<void()>;

  ~Worker();  // tasks that did not begin are dropped; the one under way has to end by itself

  std::shared_ptr<WorkState> start(Task task);
  bool idle() const;   // nothing under way or waiting
  void drain() const;  // returns once idle

 private:
  struct Item {
    Task task;
    std::shared_ptr<WorkState> state;
  };

  void work();
  bool take(Item& item);

  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  std::deque<Item> items_;  // the front one is under way
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace lockstep::shm
