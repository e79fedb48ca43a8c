// SPDX-License-Identifier: Apache-2.0
#include "lockstep/train/reports/progress.h"

#include <poll.h>
#include <unistd.h>

#include <cmath>
#include <iomanip>
#include <iostream>

#include "lockstep/base/text.h"

namespace lockstep {
namespace {

constexpr size_t kBarWidth = 24;
constexpr double kBarEvery = 0.1;     // seconds
constexpr double kPlainEvery = 10.0;  // seconds

std::string bar(int64_t done, int64_t steps) {
  const size_t filled = uint64_t(done) * kBarWidth / uint64_t(steps);
  return concat('[', std::string(filled, '#'), std::string(kBarWidth - filled, '.'), ']');
}

std::string value_or_dash(double value, int digits) { return std::isnan(value) ? "-" : fixed(value, digits); }

// Returns false where the reader has stopped (Ctrl-S): progress is not worth waiting for.
bool takes_output(int fd) {
  pollfd writable{.fd = fd, .events = POLLOUT, .revents = 0};
  return ::poll(&writable, 1, 0) > 0;
}

}  // namespace

Progress::Progress(bool shown)
    : style_(!shown                         ? Style::kNone
             : ::isatty(STDERR_FILENO) != 0 ? Style::kBar
                                            : Style::kPlain) {}

void Progress::begin_run(const std::string& headline, const RunLength& length) {
  length_ = length;
  if (style_ == Style::kNone) return;
  std::cout << headline << "\n"
            << "  epoch       time   samples/s   train loss   val loss   val accuracy" << std::endl;
}

void Progress::begin_epoch(const Position& position) {
  epoch_began_ = position;
  epoch_watch_ = Stopwatch();
  last_shown_ = 0;
}

std::string Progress::status(const Position& now, double loss) const {
  const double seconds = epoch_watch_.seconds();
  const auto steps = static_cast<double>(now.step - epoch_began_.step);
  const auto samples = static_cast<double>(now.samples - epoch_began_.samples);
  const double left = seconds / steps * static_cast<double>(length_.last_step - now.step);
  return concat("epoch ", now.epoch + 1, "/", length_.epochs, "  step ", now.step_in_epoch, "/",
                length_.steps_per_epoch, "  loss ", fixed(loss, 4), "  ",
                with_thousands(std::llround(samples / seconds)), " samples/s  ", human_seconds(left), " left");
}

void Progress::step(const Position& position, double loss) {
  const double now = epoch_watch_.seconds();
  const double every = style_ == Style::kBar ? kBarEvery : kPlainEvery;
  if (style_ == Style::kNone || now - last_shown_ < every || !takes_output(STDERR_FILENO)) return;
  last_shown_ = now;
  if (style_ == Style::kBar)
    std::cerr << '\r' << bar(position.step_in_epoch, length_.steps_per_epoch) << ' ' << status(position, loss)
              << "\033[K" << std::flush;
  else
    std::cerr << status(position, loss) << std::endl;
}

void Progress::clear_bar() const {
  if (style_ == Style::kBar && takes_output(STDERR_FILENO)) std::cerr << "\r\033[K" << std::flush;
}

void Progress::end_epoch(const Json& epoch) {
  if (style_ == Style::kNone) return;
  clear_bar();
  std::cout << std::right << std::setw(7) << epoch.at("epoch").get<int64_t>() + 1 << std::setw(11)
            << human_seconds(epoch.at("seconds")) << std::setw(12)
            << with_thousands(std::llround(epoch.at("samples_per_second").get<double>())) << std::setw(13)
            << fixed(epoch.at("train_loss"), 4) << std::setw(11) << value_or_dash(epoch.at("val_loss"), 4)
            << std::setw(15) << value_or_dash(epoch.at("val_accuracy"), 4) << std::endl;
}

void Progress::end_run(const Json& run, const std::string& table) {
  if (style_ == Style::kNone) return;
  clear_bar();
  const double accuracy = run.at("val_accuracy");
  std::cout << "done: " << run.at("steps") << " steps in " << human_seconds(run.at("seconds"));
  if (!std::isnan(accuracy)) std::cout << ", validation accuracy " << fixed(accuracy, 4);
  std::cout << '\n' << table << std::flush;
}

}  // namespace lockstep
