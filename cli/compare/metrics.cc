// SPDX-License-Identifier: Apache-2.0
#include "cli/compare/metrics.h"

#include <cmath>
#include <fstream>
#include <numeric>

namespace lockstep::compare {
namespace {

constexpr std::size_t kWarmUpSteps = 3;

std::optional<double> number(const Json& event, const std::string& name) {
  const auto found = event.find(name);
  if (found == event.end() || !found->is_number()) return std::nullopt;
  return found->get<double>();
}

void add(Metrics& metrics, const Json& event) {
  const std::string kind = event.value("event", "");
  if (kind == "step") {
    metrics.step_seconds.push_back(number(event, "seconds").value_or(0));
    metrics.step_samples.push_back(number(event, "samples").value_or(0));
    metrics.step_losses.push_back(number(event, "loss").value_or(NAN));
  } else if (kind == "epoch") {
    metrics.epoch_seconds.push_back(number(event, "seconds").value_or(0));
    metrics.epoch_accuracies.push_back(number(event, "val_accuracy"));
  } else if (kind == "run" || kind == "stop") {
    metrics.totals = event;
  }
}

std::size_t warm_up(const Metrics& metrics) {
  return std::min(kWarmUpSteps, metrics.step_seconds.size() - 1);  // one step at least is left
}

double sum_from(const std::vector<double>& values, std::size_t first) {
  return std::accumulate(values.begin() + static_cast<std::ptrdiff_t>(first), values.end(), 0.0);
}

}  // namespace

std::optional<double> Metrics::total(const std::string& name) const { return number(totals, name); }

std::optional<double> Metrics::seconds_per_step() const {
  if (step_seconds.empty()) return std::nullopt;
  return bench::median({step_seconds.begin() + static_cast<std::ptrdiff_t>(warm_up(*this)), step_seconds.end()});
}

std::optional<double> Metrics::samples_per_second() const {
  if (step_seconds.empty()) return std::nullopt;
  const double seconds = sum_from(step_seconds, warm_up(*this));
  if (seconds <= 0) return std::nullopt;
  return sum_from(step_samples, warm_up(*this)) / seconds;
}

std::optional<double> Metrics::loss() const {
  if (step_losses.empty()) return std::nullopt;
  const std::size_t last = (step_losses.size() + 9) / 10;
  return sum_from(step_losses, step_losses.size() - last) / static_cast<double>(last);
}

std::optional<double> Metrics::bytes_per_step() const {
  const auto exchanged = total("exchanged_bytes");
  const auto pushed = total("pushed_bytes");
  if (steps() == 0 || (!exchanged && !pushed)) return std::nullopt;
  return (exchanged ? *exchanged : *pushed + total("pulled_bytes").value_or(0)) / steps();
}

// Rank 0 of servers is a server: what it waits for tells nothing about the workers.
std::optional<double> Metrics::waiting() const {
  if (total("bubble")) return std::nullopt;
  const double computed = total("forward_seconds").value_or(0) + total("backward_seconds").value_or(0);
  const double seconds = sum_from(step_seconds, 0);
  if (computed == 0 || seconds <= 0) return std::nullopt;
  return (total("exchange_seconds").value_or(0) + total("data_seconds").value_or(0)) / seconds;
}

Metrics read_metrics(const std::filesystem::path& path) {
  Metrics metrics;
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    const Json event = Json::parse(line, nullptr, /*allow_exceptions=*/false);
    if (event.is_object()) add(metrics, event);
  }
  return metrics;
}

}  // namespace lockstep::compare
