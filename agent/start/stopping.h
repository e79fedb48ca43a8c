// SPDX-License-Identifier: Apache-2.0
// agent/start/stopping.h: how the ranks of a machine are stopped: a signal, the grace period, then SIGKILL.
//
// Flow:    signals that the launcher gets, a failed rank -> here -> local_ranks.h
// Owns:    nothing
// Threads: the launcher's only one
#pragma once

#include <optional>

#include "agent/start/launcher.h"
#include "agent/start/local_ranks.h"
#include "lockstep/deadline.h"

namespace lockstep {

class Stopping {
 public:
  // machines: null where they do not number themselves.
  Stopping(const FailureOptions& options, Machines* machines, const LocalRanks& ranks)
      : options_(options), machines_(machines), ranks_(ranks) {}

  // Passes it on. One of stop_signals only asks the ranks; any other begins the grace period, and another SIGINT ends it.
  void on_signal(int signal);
  void after_failure();
  void give_the_grace_period();
  void kill();
  void kill_when_due();

  bool has_begun() const { return has_begun_; }  // since the first failure or signal, but for one of stop_signals
  bool was_signalled() const { return asked_ || caught_signal_ != 0; }
  int caught_signal() const { return caught_signal_; }  // the first that ended the job; 0: none
  const std::optional<Deadline>& kill_at() const { return kill_at_; }

  bool is_stop(const ExitStatus& end) const;  // of a rank that has stopped because it was asked to
  // Others that know that this machine leaves need not wait until they miss it, nor ask who goes on.
  bool others_know() const;

 private:
  bool only_asks(int signal) const;
  void stop_all(int signal);

  const FailureOptions& options_;
  Machines* machines_;
  const LocalRanks& ranks_;
  int caught_signal_ = 0;
  bool asked_ = false;        // by one of stop_signals
  bool interrupted_ = false;  // by a SIGINT among them
  bool has_begun_ = false;
  std::optional<Deadline> kill_at_{};  // the end of the grace period, until it has come
  std::optional<Deadline> left_by_{};  // this machine, because a signal asked it to
};

}  // namespace lockstep
