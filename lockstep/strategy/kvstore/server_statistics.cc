#include "lockstep/strategy/kvstore/server_statistics.h"

#include <iomanip>
#include <sstream>

#include "lockstep/base/text.h"

namespace lockstep {
namespace {

std::string number(double value) {
  return value == static_cast<double>(static_cast<std::int64_t>(value)) ? concat(static_cast<std::int64_t>(value))
                                                                        : fixed(value, 1);
}

}  // namespace

std::string Span::text() const {
  return least() == most() ? number(least()) : concat(number(least()), "-", number(most()));
}

void ServerStatistics::add_gradient(const QuestionHeader& push, std::int64_t delay) {
  if (push.samples == 0) return;
  devices.add(static_cast<double>(push.devices));
  samples_per_device.add(static_cast<double>(push.samples) / static_cast<double>(push.devices));
  delays.add(delay);
}

void ServerStatistics::add_update(std::int64_t samples) {
  if (samples == 0) return;
  ++updates;
  samples_per_update.add(static_cast<double>(samples));
}

Report ServerStatistics::report() const {
  Report report{{"workers", workers},
                {"devices_per_worker", devices.most()},
                {"examples_per_device", samples_per_device.most()},
                {"examples_per_update", samples_per_update.most()},
                {"updates", static_cast<double>(updates)},
                {"max_delay", static_cast<double>(delays.max())},
                {"mean_delay", delays.mean()}};
  for (const auto& [delay, count] : delays.counts())
    report.emplace_back(concat("delay_", delay), static_cast<double>(count));
  return report;
}

std::string ServerStatistics::table() const {
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
