// data/loader/prefetch.h: threads that load the batches of an epoch ahead of the step that takes them.
//
// Flow:    workers claim steps in order -> load -> a queue of `depth` places -> next(), in order
// Owns:    the threads, and the batches that nobody has taken
// Threads: next() from one thread. The workers run until the destructor, which waits for the batches they are at
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "lockstep/cores.h"
#include "lockstep/data/loader/device_copy.h"
#include "lockstep/loader.h"

namespace lockstep {

struct PrefetchOptions {
  std::int64_t steps = 0;
  int workers = 1;  // >= 1
  int depth = 1;    // batches that may lie ready, or be loaded, at a time
  CoreSet cores{};  // where the workers run; empty: where the calling thread does
  torch::Device device = torch::kCPU;
  std::chrono::milliseconds timeout = std::chrono::minutes(5);
};

class Prefetcher {
 public:
  // Loads the batch of a step and adds what it took. Called by several workers at the same time.
  using Load = std::function<Batch(std::int64_t step, LoadingStatistics& took)>;

  Prefetcher(const PrefetchOptions& options, Load load);
  ~Prefetcher();
  Prefetcher(const Prefetcher&) = delete;
  Prefetcher& operator=(const Prefetcher&) = delete;

  // The batch of the next step; call it `steps` times. Blocks until it is there. Throws what `load` threw for this
  // step; DataError when no batch came within the timeout. Adds to `statistics` what happened since the last call.
  Batch next(LoadingStatistics& statistics);

 private:
  struct Place {
    bool ready = false;
    CopiedBatch batch;
    std::exception_ptr error;
  };

  void work();
  std::optional<std::int64_t> claim(LoadingStatistics& took);
  Place load(std::int64_t step, const DeviceCopy& copy, LoadingStatistics& took) const;
  void put(std::int64_t step, Place place, const LoadingStatistics& took);
  Place& place_of(std::int64_t step) { return places_[static_cast<std::size_t>(step) % places_.size()]; }

  const PrefetchOptions options_;
  const Load load_;
  std::mutex mutex_;
  std::condition_variable ready_;  // a batch was put
  std::condition_variable room_;   // a batch was taken, or all is over
  std::vector<Place> places_;
  std::int64_t claimed_ = 0;  // steps that workers have claimed
  std::int64_t taken_ = 0;    // steps that next() has given away
  int ready_count_ = 0;
  bool stopped_ = false;
  LoadingStatistics took_;  // by workers, since next() last asked
  std::vector<std::thread> workers_;
};

}  // namespace lockstep
