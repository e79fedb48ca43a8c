// SPDX-License-Identifier: Apache-2.0
#include "lockstep/data/loader/loading_hint.h"

#include <cmath>
#include <functional>

#include "lockstep/base/text.h"

namespace lockstep {
namespace {

constexpr double kWorthSaying = 0.05;  // of the time
constexpr double kBusy = 0.7;          // of the workers' time

std::string advice(const LoadingStatistics& s, const LoaderOptions& options, int cores, double seconds) {
  if (options.workers == 0) return "load in the background with --workers 1";
  const double busy = (s.read + s.assemble + s.copy) / (seconds * options.workers);
  if (busy < kBusy && options.prefetch <= 2 * options.workers)
    return concat("the workers are idle at other times: raise --prefetch from ", options.prefetch);
  if (options.workers < cores) return concat("raise --workers from ", options.workers);
  if (s.read > s.assemble) return "reading and decoding takes most of it: store smaller images";
  return "the transforms take most of it: choose fewer in --augment, or give the rank more cores";
}

template <class Combine>
LoadingStatistics combined(const LoadingStatistics& a, const LoadingStatistics& b, const Combine& combine) {
  return {.batches = combine(a.batches, b.batches),
          .samples = combine(a.samples, b.samples),
          .skipped = combine(a.skipped, b.skipped),
          .wait = combine(a.wait, b.wait),
          .read = combine(a.read, b.read),
          .assemble = combine(a.assemble, b.assemble),
          .copy = combine(a.copy, b.copy),
          .room = combine(a.room, b.room),
          .queued = combine(a.queued, b.queued)};
}

}  // namespace

LoadingStatistics& LoadingStatistics::operator+=(const LoadingStatistics& other) {
  return *this = combined(*this, other, std::plus<>());
}

LoadingStatistics operator-(LoadingStatistics a, const LoadingStatistics& b) { return combined(a, b, std::minus<>()); }

std::string loading_hint(const LoadingStatistics& statistics, const LoaderOptions& options, int cores, double seconds) {
  if (seconds <= 0 || statistics.wait < kWorthSaying * seconds) return "";
  return concat("the steps wait for data ", std::lround(100 * statistics.wait / seconds),
                " % of the time: ", advice(statistics, options, cores, seconds));
}

}  // namespace lockstep
