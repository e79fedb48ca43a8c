// SPDX-License-Identifier: Apache-2.0
#include "lockstep/train/progress.h"

#include <unistd.h>

#include <cmath>
#include <cstdio>
#include <iostream>

#include "lockstep/base/text.h"

namespace lockstep {
namespace {

constexpr std::size_t kBarWidth = 24;
constexpr double kBarEvery = 0.1;     // seconds
constexpr double kPlainEvery = 10.0;  // seconds

std::string bar(std::int64_t done, std::int64_t steps) {
  const std::size_t filled = std::uint64_t(done) * kBarWidth / std::uint64_t(steps);
  return concat('[', std::string(filled, '#'), std::string(kBarWidth - filled, '.'), ']');
}

std::string right(const std::string& text, std::size_t width) {
  return text.size() >= width ? text : std::string(width - text.size(), ' ') + text;
}

std::string value_or_dash(double value, int digits) { return std::isnan(value) ? "-" : fixed(value, digits); }

}  // namespace

Progress::Style Progress::style_for_stderr() { return ::isatty(STDERR_FILENO) != 0 ? Style::kBar : Style::kPlain; }

void Progress::begin_run(const std::string& headline) {
  if (style_ == Style::kNone) return;
  std::cout << headline << "\n"
            << "  epoch       time   samples/s   train loss   val loss   val accuracy" << std::endl;
}

void Progress::begin_epoch(const EpochPlan& plan) {
  plan_ = plan;
  steps_ = 0;
  samples_ = 0;
  epoch_watch_ = Stopwatch();
  last_shown_ = 0;
}

std::string Progress::status(const StepMetrics& metrics) const {
  const double seconds = epoch_watch_.seconds();
  const double left = seconds / static_cast<double>(steps_) * static_cast<double>(plan_.run_steps_left - steps_);
  return concat("epoch ", plan_.epoch + 1, "/", plan_.epochs, "  step ", plan_.done + steps_, "/", plan_.steps,
                "  loss ", fixed(metrics.loss, 4), "  ",
                with_thousands(std::llround(static_cast<double>(samples_) / seconds)), " samples/s  ",
                human_seconds(left), " left");
}

void Progress::step(const StepMetrics& metrics) {
  ++steps_;
  samples_ += metrics.samples;
  const double now = epoch_watch_.seconds();
  const double every = style_ == Style::kBar ? kBarEvery : kPlainEvery;
  if (style_ == Style::kNone || now - last_shown_ < every) return;
  last_shown_ = now;
  if (style_ == Style::kBar)
    std::cerr << '\r' << bar(plan_.done + steps_, plan_.steps) << ' ' << status(metrics) << "\033[K" << std::flush;
  else
    std::cerr << status(metrics) << std::endl;
}

void Progress::clear_bar() const {
  if (style_ == Style::kBar) std::cerr << "\r\033[K" << std::flush;
}

void Progress::end_epoch(const EpochMetrics& m) {
  if (style_ == Style::kNone) return;
  clear_bar();
  std::cout << right(std::to_string(m.epoch + 1), 7) << right(human_seconds(m.seconds), 11)
            << right(with_thousands(std::llround(m.samples_per_second())), 12) << right(fixed(m.train_loss, 4), 13)
            << right(value_or_dash(m.val_loss, 4), 11) << right(value_or_dash(m.val_accuracy, 4), 15) << std::endl;
}

void Progress::end_run(const RunMetrics& m, const std::string& table) {
  if (style_ == Style::kNone) return;
  clear_bar();
  std::cout << "done: " << m.steps << " steps in " << human_seconds(m.seconds);
  if (!std::isnan(m.val_accuracy)) std::cout << ", validation accuracy " << fixed(m.val_accuracy, 4);
  std::cout << '\n' << table << std::flush;
}

}  // namespace lockstep
