// SPDX-License-Identifier: Apache-2.0
#include "agent/start/stopping.h"

#include <algorithm>

#include "agent/meet/machines.h"

namespace lockstep {
namespace {

constexpr milliseconds kOthersHearWithin{2000};

}  // namespace

void Stopping::on_signal(int signal) {
  if (signal == 0) return;
  const bool again = signal == SIGINT && (has_begun_ || interrupted_);
  if (!again && only_asks(signal)) {
    asked_ = true;
    interrupted_ = interrupted_ || signal == SIGINT;
    return ranks_.signal_all(signal);
  }
  caught_signal_ = caught_signal_ == 0 ? signal : caught_signal_;
  if (machines_) {
    if (!left_by_) left_by_ = Deadline::after(kOthersHearWithin);
    machines_->want_to_leave();
  }
  again ? kill() : stop_all(signal);
}

// Kills them if SIGTERM only asks: the others would make a note of it, and wait for the failed one in their next step.
void Stopping::after_failure() { only_asks(SIGTERM) ? kill() : stop_all(SIGTERM); }

// SIGCONT: a stopped process receives the other signal only when it continues.
void Stopping::stop_all(int signal) {
  ranks_.signal_all(signal);
  ranks_.signal_all(SIGCONT);
  give_the_grace_period();
}

void Stopping::give_the_grace_period() {
  if (!has_begun_) kill_at_ = Deadline::after(options_.grace);
  has_begun_ = true;
}

void Stopping::kill() {
  has_begun_ = true;
  ranks_.signal_all(SIGKILL);
  kill_at_.reset();
}

void Stopping::kill_when_due() {
  if (kill_at_ && kill_at_->passed()) kill();
}

bool Stopping::others_know() const { return !left_by_ || left_by_->passed() || machines_->end(); }

bool Stopping::only_asks(int signal) const {
  return std::ranges::find(options_.stop_signals, signal) != options_.stop_signals.end();
}

bool Stopping::is_stop(const ExitStatus& end) const {
  if (end.signal != 0) return false;
  return options_.stop_code ? end.exit_code == *options_.stop_code : asked_ && end.exit_code == kSignalBase + SIGTERM;
}

}  // namespace lockstep
