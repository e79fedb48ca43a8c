// SPDX-License-Identifier: Apache-2.0
#include "lockstep/collective/calls/future.h"

namespace lockstep {

PeerLost not_finished_by_deadline(const std::string& here, const std::string& what) {
  return PeerLost({.what = what + " is not finished at the deadline",
                   .here = here,
                   .likely = "a rank that is slower than the others, or stopped",
                   .next = "wait longer, or see what each rank is doing"});
}

void Completion::wait(std::optional<Deadline> deadline) {
  std::unique_lock lock(mutex_);
  const auto is_done = [this] { return done_; };
  if (!deadline)
    changed_.wait(lock, is_done);
  else if (!changed_.wait_for(lock, deadline->left(), is_done))
    throw not_finished_by_deadline({});
  if (error_) std::rethrow_exception(error_);
}

bool Completion::done() {
  const std::lock_guard lock(mutex_);
  return done_;
}

void Completion::complete(std::exception_ptr error, int source) {
  const std::lock_guard lock(mutex_);
  error_ = std::move(error);
  source_ = source;
  done_ = true;
  changed_.notify_all();
}

}  // namespace lockstep
