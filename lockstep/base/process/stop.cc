// SPDX-License-Identifier: Apache-2.0
#include "lockstep/base/process/stop.h"

#include <signal.h>

#include <atomic>
#include <memory>

#include "lockstep/base/text.h"
#include "lockstep/error.h"

namespace lockstep {
namespace {

std::atomic<int> first_signal{0};
static_assert(std::atomic<int>::is_always_lock_free, "written by a handler of signals");
std::atomic<bool> is_catching{false};

struct Agreement {
  std::atomic<bool> has_others{false};
  std::atomic<bool> reached{false};
};

Agreement of_process;
thread_local std::unique_ptr<Agreement> of_thread;

Agreement& of_this_rank() { return of_thread ? *of_thread : of_process; }

extern "C" void note_stop_signal(int signal) {
  int none = 0;
  first_signal.compare_exchange_strong(none, signal);
}

// SA_RESETHAND: the second Ctrl-C has its usual effect.
void catch_signal(int signal) {
  struct sigaction before {};
  if (::sigaction(signal, nullptr, &before) != 0)
    throw UsageError({.what = concat("signal ", signal, " can't ask a job to stop: it can't be caught"),
                      .next = "choose SIGTERM, SIGUSR1 or SIGUSR2"});
  if (before.sa_handler != SIG_DFL) return;
  struct sigaction action {};
  action.sa_handler = &note_stop_signal;
  action.sa_flags = SA_RESTART | (signal == SIGINT ? SA_RESETHAND : 0);
  if (::sigaction(signal, &action, nullptr) != 0) throw system_error("catch", concat("signal ", signal));
}

}  // namespace

void catch_stop_signals(const std::vector<int>& signals) {
  is_catching = true;
  for (const int signal : signals.empty() ? std::vector<int>{SIGTERM, SIGUSR1} : signals) catch_signal(signal);
  if (stop_signal() == 0) catch_signal(SIGINT);
}

int stop_signal() { return first_signal; }

bool stop_requested() {
  if (!is_catching) catch_stop_signals();
  return has_agreed_to_stop();
}

bool has_agreed_to_stop() {
  const Agreement& mine = of_this_rank();
  return mine.has_others ? mine.reached.load() : wants_to_stop();
}

void agree_to_stop() { of_this_rank().reached = true; }

void stop_together() { of_this_rank().has_others = true; }

RankOfThread::RankOfThread() { of_thread = std::make_unique<Agreement>(); }
RankOfThread::~RankOfThread() { of_thread.reset(); }

}  // namespace lockstep
