#include "lockstep/strategy/kvstore/delay_histogram.h"

#include <algorithm>
#include <iomanip>
#include <sstream>
#include <vector>

#include "lockstep/base/text.h"

namespace lockstep {
namespace {

constexpr std::int64_t kLines = 16;
constexpr std::int64_t kBarWidth = 40;

}  // namespace

std::int64_t DelayHistogram::gradients() const {
  std::int64_t all = 0;
  for (const auto& [delay, count] : counts_) all += count;
  return all;
}

double DelayHistogram::mean() const {
  double sum = 0;
  for (const auto& [delay, count] : counts_) sum += static_cast<double>(delay * count);
  return counts_.empty() ? 0 : sum / static_cast<double>(gradients());
}

std::string DelayHistogram::text() const {
  const std::int64_t width = max() / kLines + 1;  // delays in a line
  std::vector<std::int64_t> lines(static_cast<std::size_t>(max() / width + 1));
  for (const auto& [delay, count] : counts_) lines[static_cast<std::size_t>(delay / width)] += count;
  const std::int64_t most = std::max<std::int64_t>(1, std::ranges::max(lines));
  std::ostringstream out;
  for (std::size_t i = 0; i < lines.size(); ++i) {
    const std::int64_t first = static_cast<std::int64_t>(i) * width;
    const std::string delays = width == 1 ? concat(first) : concat(first, "-", first + width - 1);
    out << "  delay " << std::setw(9) << std::left << delays << std::setw(10) << std::right << lines[i] << "  "
        << std::string(static_cast<std::size_t>(lines[i] * kBarWidth / most), '#') << '\n';
  }
  return std::move(out).str();
}

}  // namespace lockstep
