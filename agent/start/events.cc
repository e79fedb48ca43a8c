// SPDX-License-Identifier: Apache-2.0
#include "agent/start/events.h"

#include <sys/signalfd.h>

#include "lockstep/base/sockets/poll.h"
#include "lockstep/error.h"

namespace lockstep {
namespace {

bool is_ignored(int signal) {
  struct sigaction action {};
  ::sigaction(signal, nullptr, &action);
  return action.sa_handler == SIG_IGN;
}

}  // namespace

SignalReader::SignalReader(const std::vector<int>& others) {
  ::sigemptyset(&caught_);
  std::vector<int> signals = {SIGINT, SIGTERM};
  signals.insert(signals.end(), others.begin(), others.end());
  for (const int signal : signals)
    if (!is_ignored(signal)) ::sigaddset(&caught_, signal);
  fd_.reset(::signalfd(-1, &caught_, SFD_CLOEXEC | SFD_NONBLOCK));
  if (!fd_) throw system_error("make", "a descriptor for signals");
  struct sigaction keep_children {};
  keep_children.sa_handler = SIG_DFL;
  ::sigaction(SIGCHLD, &keep_children, &old_child_action_);
  ::sigprocmask(SIG_BLOCK, &caught_, &old_mask_);
}

SignalReader::~SignalReader() {
  ::sigprocmask(SIG_SETMASK, &old_mask_, nullptr);
  ::sigaction(SIGCHLD, &old_child_action_, nullptr);
}

int SignalReader::next() const {
  signalfd_siginfo info{};
  return ::read(fd_.get(), &info, sizeof info) == sizeof info ? static_cast<int>(info.ssi_signo) : 0;
}

void poll_events(const std::vector<Event>& events, int timeout_ms) {
  std::vector<pollfd> fds;
  for (const Event& event : events) fds.push_back(to_poll(event.fd, event.events));
  const int ready = poll_for(fds, milliseconds(timeout_ms));
  if (ready < 0 && errno != EINTR) throw system_error("wait for", "the ranks");
  for (size_t i = 0; ready > 0 && i < fds.size(); ++i)
    if (fds[i].revents != 0) events[i].on_ready();
}

}  // namespace lockstep
