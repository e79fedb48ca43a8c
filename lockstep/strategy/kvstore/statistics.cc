// SPDX-License-Identifier: Apache-2.0
#include "lockstep/strategy/kvstore/statistics.h"

#include <cmath>
#include <iomanip>
#include <sstream>
#include <vector>

#include "lockstep/base/text.h"
#include "lockstep/observe/rank_progress.h"
#include "lockstep/observe/trace.h"

namespace lockstep {
namespace {

constexpr int64_t kLines = 16;
constexpr int64_t kBarWidth = 40;

// Without a fraction where it is whole.
std::string number(double value) { return fixed(value, value == std::floor(value) ? 0 : 1); }

}  // namespace

std::string Extremes::text() const {
  return least_ >= most_ ? number(most_) : concat(number(least_), "-", number(most_));
}

std::string DelayHistogram::text() const {
  const int64_t width = max() / kLines + 1;  // delays in a line
  std::vector<int64_t> lines(max() / width + 1);
  for (const auto& [delay, count] : counts_) lines[delay / width] += count;
  const int64_t most = std::max<int64_t>(1, std::ranges::max(lines));
  std::ostringstream out;
  for (int64_t first = 0; const int64_t count : lines) {
    const std::string delays = width == 1 ? concat(first) : concat(first, "-", first + width - 1);
    out << "  delay " << std::setw(9) << std::left << delays << std::setw(10) << std::right << count << "  "
        << std::string(count * kBarWidth / most, '#') << '\n';
    first += width;
  }
  return std::move(out).str();
}

void StoreStatistics::add_gradient(int64_t samples, int64_t devices_of_worker, int64_t delay) {
  if (samples == 0) return;
  devices.add(to_double(devices_of_worker));
  samples_per_device.add(fraction(samples, devices_of_worker));
  delays.add(delay);
  trace::count("staleness", delay);
  observe::has_applied_gradient(delay);
}

void StoreStatistics::add_update(int64_t samples) {
  if (samples == 0) return;
  ++updates;
  samples_per_update.add(to_double(samples));
}

Report StoreStatistics::report() const {
  Report report{{"workers", workers},
                {"devices_per_worker", devices.most()},
                {"examples_per_device", samples_per_device.most()},
                {"examples_per_update", samples_per_update.most()},
                {"updates", updates},
                {"pushed_bytes", pushed_bytes},
                {"pulled_bytes", pulled_bytes},
                {"max_delay", delays.max()},
                {"mean_delay", delays.mean()}};
  for (const auto& [delay, count] : delays.counts()) report.emplace_back(concat("delay_", delay), count);
  return report;
}

std::string StoreStatistics::table() const {
  std::ostringstream out;
  out << "  store                    devices   workers   examples per device   examples per update   max delay\n"
      << "  " << std::left << std::setw(22) << store << std::right << std::setw(10) << devices.text() << std::setw(10)
      << workers << std::setw(22) << samples_per_device.text() << std::setw(22) << samples_per_update.text()
      << std::setw(12) << delays.max() << '\n';
  if (delays.max() > 0)
    out << "  gradients by delay, in updates made elsewhere since the weights were read:\n" << delays.text();
  return std::move(out).str();
}

}  // namespace lockstep
