// data/loading_statistics.h: where the time of loading goes, and what to change when the step waits for data.
//
// Threads: values
// Ranks:   each has its own
#pragma once

#include <cstdint>
#include <string>

namespace lockstep {

// Of one rank, added up over batches. Seconds of the workers are seconds of all workers together.
struct LoadingStatistics {
  std::int64_t batches = 0;
  std::int64_t samples = 0;  // of this rank
  std::int64_t skipped = 0;  // bad samples
  double wait = 0;           // the training thread had no batch
  double read = 0;           // workers: disk or page cache, checksum, decoding
  double assemble = 0;       // workers: transforms, writing the batch
  double copy = 0;           // workers: starting the copy to the device
  double room = 0;           // workers: the queue was full
  double queued = 0;         // batches that were ready when one was taken, summed; / batches is the queue's mean depth

  double mean_queued() const { return batches > 0 ? queued / static_cast<double>(batches) : 0; }
  LoadingStatistics& operator+=(const LoadingStatistics& other);
};

LoadingStatistics operator-(LoadingStatistics a, const LoadingStatistics& b);  // what lies between two readings

struct LoadingSettings {
  int workers = 0;
  int prefetch = 0;
  int cores = 1;  // of this rank
};

// One sentence that names the setting to change, or "" while waiting takes less than 5 % of `seconds`, the time of the steps.
std::string loading_hint(const LoadingStatistics& statistics, const LoadingSettings& settings, double seconds);

}  // namespace lockstep
