// lockstep/loader.h: this rank's batches of an epoch, loaded in the background.
#pragma once

#include <chrono>
#include <cstdint>
#include <iterator>
#include <memory>
#include <string>
#include <utility>

#include "lockstep/dataset.h"
#include "lockstep/sampler.h"
#include "lockstep/world.h"

// ---- where the time of loading goes, and what to change when the step waits for data.
//
// Threads: values
// Ranks:   each has its own

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

// One sentence that names the setting to change, or "" while waiting takes less than 5 % of `seconds`, the time of the
// steps.
std::string loading_hint(const LoadingStatistics& statistics, const LoadingSettings& settings, double seconds);

}  // namespace lockstep

// ---- this rank's batches of an epoch, one after another, loaded in the background.
//
// Flow:    Dataset + DistributedSampler -> workers (data/loader/prefetch.h) -> here -> the training loop
// Owns:    the dataset, the sampler, the workers and the batches that lie ready
// Threads: one thread; the workers are its own
// Ranks:   no communication; every rank gets the same number of batches per epoch

namespace lockstep {

struct LoaderOptions {
  std::int64_t batch_size = 1;  // global: over all ranks
  std::uint64_t seed = 0;
  bool shuffle = true;
  int workers = 1;            // threads that load, beside the rank's own; 0: the thread that asks
  int prefetch = 4;           // batches that may lie ready; memory is bounded by these and by what you hold
  std::int64_t skip_bad = 0;  // samples of an epoch and rank that may be left out as unreadable; one more is an error
  bool empty = false;         // batches without samples: of a rank that trains on nothing itself
  std::shared_ptr<const SampleOrder> order{};                   // in place of shuffle, such as weighted_order
  std::chrono::milliseconds timeout = std::chrono::minutes(5);  // for one batch
};

// Where an epoch stands over all ranks: what a checkpoint has to keep of a loader.
struct LoaderPosition {
  std::int64_t epoch = 0;
  std::int64_t samples = 0;  // of the epoch's order that were handed out
};

class Loader {
 public:
  // Throws UsageError: a batch smaller than the ranks, no samples, a negative number.
  Loader(const World& world, std::shared_ptr<const Dataset> dataset, const LoaderOptions& options);
  ~Loader();
  Loader(Loader&&) noexcept;
  Loader& operator=(Loader&&) noexcept;

  const Dataset& dataset() const;
  std::int64_t steps_per_epoch() const;

  class Iterator;
  class State;
  // The batches of an epoch from some place on, for a range-for; on the world's device. A batch may be kept: its memory
  // is used again only when its last tensor is gone. begin() starts the workers; starting another epoch ends this one.
  // Going on to the next batch blocks until it is there, and throws what the dataset threw for it.
  struct Epoch {
    State* state;
    LoaderPosition from;
    Iterator begin() const;
    std::default_sentinel_t end() const { return {}; }
  };
  Epoch epoch(std::int64_t epoch, std::int64_t first_step = 0);

  // The batches that were not handed out yet at `position`, without repeating or losing a sample, whatever the number
  // of ranks and the batch size were then. Throws UsageError (in begin): a position that this dataset does not have.
  Epoch resume(const LoaderPosition& position);
  LoaderPosition position() const;  // the batch that the range-for is at counts as handed out

  const LoadingStatistics& statistics() const;                             // since this was made
  std::string hint(const LoadingStatistics& since, double seconds) const;  // see loading_hint

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
