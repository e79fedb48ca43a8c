// SPDX-License-Identifier: Apache-2.0
// Preloaded into the processes of a host: CLOCK_MONOTONIC, which std::chrono::steady_clock reads, gains DRIFT_PPM
// microseconds per second since DRIFT_SINCE, in ns of that clock. The kernel's own waits do not: keep the drift small.
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>

namespace {

constexpr int64_t kSecond = 1'000'000'000;

int64_t number(const char* name) {
  const char* const told = ::getenv(name);
  return told == nullptr ? 0 : std::strtoll(told, nullptr, 10);
}

}  // namespace

extern "C" int clock_gettime(clockid_t clock, timespec* time) noexcept {
  static const int64_t ppm = number("DRIFT_PPM"), since = number("DRIFT_SINCE");
  const auto failed = static_cast<int>(::syscall(SYS_clock_gettime, clock, time));
  if (failed != 0 || clock != CLOCK_MONOTONIC || ppm == 0) return failed;
  const int64_t told = time->tv_sec * kSecond + time->tv_nsec;
  const int64_t drifted = told + (told - since) / 1000 * ppm / 1000;
  time->tv_sec = drifted / kSecond;
  time->tv_nsec = drifted % kSecond;
  return 0;
}
