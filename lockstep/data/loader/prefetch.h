// SPDX-License-Identifier: Apache-2.0
// data/loader/prefetch.h: threads that load the batches of an epoch ahead of the step that takes them.
//
// Flow:    workers claim steps in order -> load -> a queue of `prefetch` slots -> next(), in order
// Owns:    the threads, and the batches that are not taken yet
// Threads: next() from one thread. The destructor stops the workers and waits for the batches they are loading, at most
//          LoaderOptions::timeout; a worker that hangs longer, in a read that the disk does not answer, is left behind
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "lockstep/base/process/own_process.h"
#include "lockstep/loader.h"

namespace lockstep {

void check_loader(const LoaderOptions& options);  // throws UsageError: a number that is too small

class Prefetcher {
 public:
  // Loads the batch of a step and adds what it took. Called by several workers at the same time. It has to own what it
  // uses: a worker that hangs outlives the Prefetcher.
  using Load = std::function<Batch(int64_t step, LoadingStatistics& took)>;

  // Loads `steps` batches. Without workers next() loads.
  Prefetcher(const LoaderOptions& options, const LoaderPlace& place, int64_t steps, Load load);
  ~Prefetcher();
  Prefetcher& operator=(Prefetcher&&) = delete;

  // The batch of the next step; call it `steps` times. Blocks until it is ready. Throws what `load` threw for this
  // step; DataError when no batch came within the timeout. Adds to `statistics` what happened since the last call.
  Batch next(LoadingStatistics& statistics);

 private:
  class Shared;
  std::shared_ptr<Shared> shared_;  // with the workers
  std::vector<std::thread> workers_;
  OwnProcess process_;
};

}  // namespace lockstep
