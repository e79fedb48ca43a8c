// SPDX-License-Identifier: Apache-2.0
#include "lockstep/base/process/own_process.h"

#include <atomic>

namespace lockstep {
namespace {

std::atomic<unsigned> forks{0};  // that led to this process, since the first OwnProcess

void count_forks() {
  static const int registered =
      ::pthread_atfork(nullptr, nullptr, [] { forks.fetch_add(1, std::memory_order_relaxed); });
  static_cast<void>(registered);
}

}  // namespace

OwnProcess::OwnProcess() {
  count_forks();
  forks_ = forks.load(std::memory_order_relaxed);
}

bool OwnProcess::is_here() const { return forks_ == forks.load(std::memory_order_relaxed); }

}  // namespace lockstep
