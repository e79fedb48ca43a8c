// SPDX-License-Identifier: Apache-2.0
// lockstep/loader.h: this rank's batches of an epoch, one after another, loaded in the background.
//
// Flow:    Dataset + DistributedSampler -> worker threads -> a queue of ready batches -> the training loop
// Owns:    the dataset, the sampler, the workers and the batches that are ready
// Threads: one thread; the workers are its own
// Ranks:   no communication; every rank gets the same number of batches per epoch
#pragma once

#include <iterator>

#include "lockstep/dataset.h"
#include "lockstep/sampler.h"
#include "lockstep/world.h"

namespace lockstep {

struct LoaderOptions {
  int64_t batch_size = 1;  // global: over all ranks
  uint64_t seed = 0;
  bool shuffle = true;
  int workers = 1;         // threads that load in the background; 0: the calling thread loads
  int prefetch = 4;        // batches that may be ready; memory is bounded by these and by what you hold
  int64_t skip_bad = 0;    // unreadable samples that may be left out per epoch and rank; one more is an error
  bool empty = false;      // batches without samples: for a rank that trains on nothing itself
  SampleOrderPtr order{};  // replaces shuffle, such as weighted_order
  milliseconds timeout = kDefaultTimeout;  // for one batch
  // Called by the thread that waits for a batch, about ten times a second. What it throws ends the wait and the epoch.
  std::function<void()> while_waiting{};
};

// Which rank loads, and where: what a Loader needs to know of a World.
struct LoaderPlace {
  int rank = 0;
  int ranks = 1;
  torch::Device device = torch::kCPU;  // of the batches
  CoreSet cores{};                     // where the workers run; empty: where the calling thread does
  bool pinned = false;                 // batches on the CPU lie in pinned memory, from which GPUs copy
};

// The place of an epoch over all ranks: what a checkpoint has to keep of a loader.
struct LoaderPosition {
  int64_t epoch = 0;
  int64_t samples = 0;  // of the epoch's order that were handed out
};

// The time of loading on one rank, summed over batches; the workers' seconds are those of all workers.
struct LoadingStatistics {
  int64_t batches = 0;
  int64_t samples = 0;  // of this rank
  int64_t skipped = 0;  // bad samples
  double wait = 0;      // the training thread waited for a batch
  double read = 0;      // workers: disk or page cache, checksum, decoding
  double assemble = 0;  // workers: transforms, writing the batch
  double copy = 0;      // workers: starting the copy to the device
  double room = 0;      // workers: the queue was full
  double queued = 0;    // batches that were ready when one was taken, summed; / batches is the queue's mean depth

  double mean_queued() const { return batches > 0 ? queued / static_cast<double>(batches) : 0; }
  LoadingStatistics& operator+=(const LoadingStatistics& other);
};

LoadingStatistics operator-(LoadingStatistics a, const LoadingStatistics& b);  // between two readings

class Loader {
 public:
  // Throws UsageError: a batch smaller than the ranks, no samples, a negative number.
  Loader(const World& world, DatasetPtr dataset, const LoaderOptions& options);
  Loader(const LoaderPlace& place, DatasetPtr dataset, const LoaderOptions& options);

  // Stops the workers and waits for the batches that they are loading, at most LoaderOptions::timeout: a worker that
  // the disk does not answer by then is left behind, with a warning.
  ~Loader();
  Loader(Loader&&) noexcept;
  Loader& operator=(Loader&&) noexcept;

  const Dataset& dataset() const;
  int64_t steps_per_epoch() const;

  class Iterator;
  struct State;
  // The batches of an epoch, for a range-for; on the world's device. A batch may be kept: its memory is reused only
  // when its last tensor is gone. begin() starts the workers; starting another epoch ends this one. Going on to the
  // next batch blocks until it is ready, and throws what the dataset threw for it; DataError after the timeout.
  struct Epoch {
    State* state;
    LoaderPosition from;
    Iterator begin() const;
    std::default_sentinel_t end() const { return {}; }
  };
  Epoch epoch(int64_t epoch, int64_t first_step = 0);

  // The batches that were not handed out yet at `position`, without repeating or losing a sample, whatever the number
  // of ranks and the batch size were then. Throws UsageError (in begin): a position that this dataset does not have.
  Epoch resume(const LoaderPosition& position);
  LoaderPosition position() const;  // counts the batch that the range-for is at as handed out

  // Ends the epoch and its workers, as the destructor does, and frees the batches that were ready. position() stays.
  void stop();

  const LoadingStatistics& statistics() const;  // since construction

  // One sentence that names the option to change, or "" while waiting took less than 5 % of `seconds`, the time of the
  // steps. `since`: statistics() now minus an earlier reading.
  std::string hint(const LoadingStatistics& since, double seconds) const;

 private:
  std::unique_ptr<State> state_;
};

class Loader::Iterator {
 public:
  explicit Iterator(State& state) : state_(&state) { advance(); }
  Batch& operator*() { return batch_; }
  Iterator& operator++() {
    advance();
    return *this;
  }
  bool operator==(std::default_sentinel_t) const { return done_; }

 private:
  void advance();

  State* state_;
  Batch batch_;
  bool done_ = false;
};

template <class D>
Loader make_loader(const World& world, D dataset, const LoaderOptions& options) {
  return Loader(world, std::make_shared<const D>(std::move(dataset)), options);
}

}  // namespace lockstep
