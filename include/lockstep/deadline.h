// SPDX-License-Identifier: Apache-2.0
// lockstep/deadline.h: a point in time by which a wait has to end, and a stopwatch. docs/process.md lists the few waits
// of lockstep that have no deadline, and what bounds each of them.
//
// Flow:    a timeout option -> Deadline::after() -> every wait of the call -> left()
// Owns:    nothing
// Threads: values; they never change after construction
// Ranks:   no communication
#pragma once

#include <algorithm>
#include <chrono>

namespace lockstep {

using std::chrono::milliseconds;

// The longest that one wait for another rank, device or batch may take, unless the options say otherwise.
inline constexpr milliseconds kDefaultTimeout = std::chrono::minutes(5);

class Deadline {
 public:
  using Clock = std::chrono::steady_clock;

  // The most milliseconds that poll() can count; a longer wait ends there too.
  static constexpr milliseconds kLongest = std::chrono::days(24);

  static Deadline after(milliseconds duration) { return Deadline(Clock::now() + std::min(duration, kLongest)); }

  bool passed() const { return Clock::now() >= when_; }

  // Time left, never negative; what poll() and wait(timeout) take.
  milliseconds left() const {
    const auto left = std::chrono::ceil<milliseconds>(when_ - Clock::now());
    return std::max(left, milliseconds(0));
  }

 private:
  explicit Deadline(Clock::time_point when) : when_(when) {}
  Clock::time_point when_;
};

// Seconds since construction, on the clock that never goes back.
class Stopwatch {
 public:
  double seconds() const { return std::chrono::duration<double>(Deadline::Clock::now() - start_).count(); }

 private:
  Deadline::Clock::time_point start_ = Deadline::Clock::now();
};

}  // namespace lockstep
