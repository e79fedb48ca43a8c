// SPDX-License-Identifier: Apache-2.0
#include "lockstep/loader.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <functional>
#include <mutex>
#include <optional>
#include <utility>

#include "lockstep/base/log.h"
#include "lockstep/base/process/stoppable.h"
#include "lockstep/base/text.h"
#include "lockstep/base/to_size.h"
#include "lockstep/data/loader/batch_memory.h"
#include "lockstep/data/loader/prefetch.h"
#include "lockstep/deadline.h"
#include "lockstep/error.h"
#include "lockstep/observe/rank_progress.h"

namespace lockstep {
namespace {

SamplerOptions sampler_options(const LoaderPlace& place, const Dataset& dataset, const LoaderOptions& options) {
  return {.samples = dataset.size(),
          .batch_size = options.batch_size,
          .rank = place.rank,
          .ranks = place.ranks,
          .seed = options.seed,
          .shuffle = options.shuffle,
          .order = options.order || !options.shuffle ? options.order : dataset.shuffled_order()};
}

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

void check_loader(const LoaderOptions& options) {
  const auto require = [](int64_t value, int64_t least, const char* name) {
    if (value < least)
      throw UsageError({.what = concat(name, "=", value, " is too small"), .next = concat("give at least ", least)});
  };
  require(options.batch_size, 1, "batch_size");
  require(options.workers, 0, "workers");
  require(options.prefetch, 1, "prefetch");
  require(options.skip_bad, 0, "skip_bad");
}

// Makes this rank's batches of one epoch. The workers share it with the loader: one that hangs in a read outlives both,
// and must find neither the dataset gone nor the sampler at another epoch.
struct EpochBatches {
  const LoaderOptions options;
  const DatasetPtr dataset;
  const DistributedSampler sampler;
  const std::shared_ptr<BatchMemory> memory;
  const int64_t epoch;
  std::atomic<int64_t> skipped = 0;

  Batch load(int64_t step, LoadingStatistics& took) {
    const Stopwatch watch;
    const std::vector<int64_t> indices = part(step);
    read_ahead(step);
    double reading = 0;
    Batch batch = assemble(
        {.indices = indices, .seed = options.seed, .epoch = epoch, .memory = memory.get(), .read_seconds = &reading},
        took);
    took.read += reading;
    took.assemble += watch.seconds() - reading;
    return batch;
  }

  std::vector<int64_t> part(int64_t step) const { return options.empty ? std::vector<int64_t>() : sampler.part(step); }

  // Announces the batch that this worker comes to next (each of W workers takes every W-th, more or less), so that the
  // disk reads it while this one is decoded.
  void read_ahead(int64_t step) const {
    const int64_t next = step + std::max(1, options.workers);
    if (next < sampler.steps()) dataset->will_read(part(next));
  }

  Batch assemble(const BatchRequest& request, LoadingStatistics& took) {
    try {
      return dataset->assemble(request);
    } catch (const DataError&) {
      if (options.skip_bad == 0) throw;
    }
    return assemble_good_ones(request, took);
  }

  // One by one, to find out which samples are bad.
  Batch assemble_good_ones(BatchRequest request, LoadingStatistics& took) {
    std::vector<Batch> good;
    for (const int64_t& index : std::exchange(request.indices, {})) {
      request.indices = {&index, 1};
      try {
        good.push_back(dataset->assemble(request));
      } catch (const DataError& error) {
        skip(error);
        ++took.skipped;
      }
    }
    request.indices = {};
    return good.empty() ? dataset->assemble(request) : concatenated(good);
  }

  void skip(const DataError& error) {
    const int64_t count = ++skipped;
    if (count > options.skip_bad)
      throw DataError({.what = concat(count, " bad samples in this epoch, ", options.skip_bad,
                                      " may be skipped; the last one: ", error.text().what),
                       .here = error.text().here,
                       .likely = error.text().likely,
                       .next = "repair the data, or raise --skip-bad"});
    if (count == 1) log_warning(concat("skipped a bad sample: ", error.text().what, " (", error.text().here, ")"));
  }
};

struct Loader::State {
  State(const LoaderPlace& where, DatasetPtr data, const LoaderOptions& loader_options)
      : options(loader_options),
        place(where),
        dataset(std::move(data)),
        sampler(sampler_options(place, *dataset, options)),
        memory(std::make_shared<BatchMemory>(to_size(2 * (options.prefetch + options.workers + 1)),
                                             place.pinned || !place.device.is_cpu())) {
    check_loader(options);
  }

  void start(const LoaderPosition& from) {
    workers.reset();
    observe::has_loader(options.workers);
    sampler.set_epoch(from.epoch, from.samples);
    epoch = from.epoch;
    step = 0;
    LoaderOptions watching = options;
    watching.while_waiting = [this] {
      require_not_stopped();
      if (options.while_waiting) options.while_waiting();
    };
    const auto batches = std::make_shared<EpochBatches>(options, dataset, sampler, memory, epoch);
    workers.emplace(watching, place, sampler.steps(),
                    [batches](int64_t at, LoadingStatistics& took) { return batches->load(at, took); });
  }

  void require_not_stopped() {
    const std::lock_guard lock(stopped_mutex);
    if (stopped) throw DataError({.what = concat("the loader of ", dataset->name(), " was stopped: ", *stopped)});
  }

  std::optional<Batch> next() {
    require_not_stopped();
    if (!workers || step == sampler.steps()) {
      workers.reset();
      return std::nullopt;
    }
    Batch batch = workers->next(statistics);
    ++step;
    ++statistics.batches;
    statistics.samples += batch.size();
    return batch;
  }

  const LoaderOptions options;
  const LoaderPlace place;
  const DatasetPtr dataset;
  DistributedSampler sampler;
  const std::shared_ptr<BatchMemory> memory;
  LoadingStatistics statistics;
  int64_t epoch = 0;
  int64_t step = 0;  // batches of this epoch that were handed out
  std::optional<Prefetcher> workers;
  std::mutex stopped_mutex;
  std::optional<std::string> stopped;                            // why; guarded by stopped_mutex
  const Stoppable stoppable{[this](const std::string& reason) {  // the last member
    const std::lock_guard lock(stopped_mutex);
    stopped = reason;
  }};
};

Loader::Loader(const World& world, DatasetPtr dataset, const LoaderOptions& options)
    : Loader(LoaderPlace{world.rank(), world.size(), world.device(), world.cores()}, std::move(dataset), options) {}
Loader::Loader(const LoaderPlace& place, DatasetPtr dataset, const LoaderOptions& options)
    : state_(std::make_unique<State>(place, std::move(dataset), options)) {}
Loader::~Loader() = default;
Loader::Loader(Loader&&) noexcept = default;
Loader& Loader::operator=(Loader&&) noexcept = default;

void Loader::stop() { state_->workers.reset(); }

const Dataset& Loader::dataset() const { return *state_->dataset; }
int64_t Loader::steps_per_epoch() const { return state_->sampler.steps_per_epoch(); }
const LoadingStatistics& Loader::statistics() const { return state_->statistics; }
LoaderPosition Loader::position() const { return {state_->epoch, state_->sampler.samples_before(state_->step)}; }

std::string Loader::hint(const LoadingStatistics& since, double seconds) const {
  if (seconds <= 0 || since.wait < kWorthSaying * seconds) return "";
  return concat("the steps wait for data ", std::lround(100 * since.wait / seconds),
                " % of the time: ", advice(since, state_->options, to_int(state_->place.cores.size()), seconds));
}

Loader::Epoch Loader::epoch(int64_t epoch, int64_t first_step) {
  return resume({epoch, std::min(first_step * state_->options.batch_size, state_->sampler.samples())});
}

Loader::Epoch Loader::resume(const LoaderPosition& position) { return {state_.get(), position}; }

Loader::Iterator Loader::Epoch::begin() const {
  state->start(from);
  return Iterator(*state);
}

void Loader::Iterator::advance() {
  batch_ = {};  // its memory serves a later batch
  std::optional<Batch> next = state_->next();
  done_ = !next;
  if (next) batch_ = std::move(*next);
}

}  // namespace lockstep
