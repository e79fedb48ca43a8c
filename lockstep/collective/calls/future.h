// SPDX-License-Identifier: Apache-2.0
// collective/calls/future.h: a call that was started: how it is waited for.
//
// Flow:    Transport::start, shm::Group::start -> Future -> Work::wait
// Threads: any may wait
#pragma once

#include <condition_variable>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "lockstep/collective_types.h"
#include "lockstep/deadline.h"
#include "lockstep/error.h"

namespace lockstep {

class Future {
 public:
  virtual ~Future() = default;

  // Blocks until the call is finished, and throws what it threw, each time. At a deadline it throws PeerLost; the call
  // goes on and can be waited for again.
  virtual void wait(std::optional<Deadline> deadline = {}) = 0;
  virtual bool done() = 0;  // finished, well or not; never blocks

  virtual int source() const { return kAnyRank; }  // of a finished receive: the sender
};

using FuturePtr = std::shared_ptr<Future>;

inline PeerLost not_finished_by_deadline(const std::string& here, const std::string& what = "a call that was started") {
  return PeerLost({.what = what + " is not finished at the deadline",
                   .here = here,
                   .likely = "a rank that is slower than the others, or stopped",
                   .next = "give more time, or look at every rank with lockstep top"});
}

// A future that another thread completes.
class Completion final : public Future {
 public:
  void wait(std::optional<Deadline> deadline) override {
    std::unique_lock lock(mutex_);
    const auto is_done = [this] { return done_; };
    if (!deadline)
      changed_.wait(lock, is_done);
    else if (!changed_.wait_for(lock, deadline->left(), is_done))
      throw not_finished_by_deadline({});
    if (error_) std::rethrow_exception(error_);
  }
  bool done() override {
    const std::lock_guard lock(mutex_);
    return done_;
  }
  int source() const override { return source_; }

  void complete(std::exception_ptr error = nullptr, int source = kAnyRank) {  // once
    const std::lock_guard lock(mutex_);
    error_ = std::move(error);
    source_ = source;
    done_ = true;
    changed_.notify_all();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool done_ = false;  // guarded by mutex_
  std::exception_ptr error_;
  int source_ = kAnyRank;
};

}  // namespace lockstep
