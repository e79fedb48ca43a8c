#include "lockstep/data/loader/prefetch.h"

#include <algorithm>

#include "lockstep/base/text.h"
#include "lockstep/deadline.h"
#include "lockstep/error.h"

namespace lockstep {

Prefetcher::Prefetcher(const PrefetchOptions& options, Load load)
    : options_(options), load_(std::move(load)), places_(static_cast<std::size_t>(std::max(1, options.depth))) {
  for (int i = 0; i < options.workers; ++i) workers_.emplace_back([this] { work(); });
}

Prefetcher::~Prefetcher() {
  {
    const std::lock_guard lock(mutex_);
    stopped_ = true;
  }
  room_.notify_all();
  for (std::thread& worker : workers_) worker.join();
}

void Prefetcher::work() {
  DeviceCopy copy(options_.device);
  bool pinned = options_.cores.empty();
  for (;;) {
    LoadingStatistics took;
    const auto step = claim(took);
    if (!step) return;
    Place place;
    try {
      if (!std::exchange(pinned, true)) pin_this_thread(options_.cores);
      place = load(*step, copy, took);
    } catch (...) {
      place.error = std::current_exception();
    }
    put(*step, std::move(place), took);
  }
}

// The next step that has a place in the queue. Waits for one to be taken, or for the end.
std::optional<std::int64_t> Prefetcher::claim(LoadingStatistics& took) {
  const Stopwatch watch;
  std::unique_lock lock(mutex_);
  const auto places = static_cast<std::int64_t>(places_.size());
  room_.wait(lock, [&] { return stopped_ || claimed_ == options_.steps || claimed_ < taken_ + places; });
  took.room += watch.seconds();
  if (stopped_ || claimed_ == options_.steps) return std::nullopt;
  return claimed_++;
}

Prefetcher::Place Prefetcher::load(std::int64_t step, const DeviceCopy& copy, LoadingStatistics& took) const {
  Batch batch = load_(step, took);
  const Stopwatch watch;
  Place place{.batch = copy.start(std::move(batch))};
  took.copy += watch.seconds();
  return place;
}

void Prefetcher::put(std::int64_t step, Place place, const LoadingStatistics& took) {
  {
    const std::lock_guard lock(mutex_);
    place.ready = true;
    place_of(step) = std::move(place);
    ++ready_count_;
    took_ += took;
  }
  ready_.notify_one();
}

Batch Prefetcher::next(LoadingStatistics& statistics) {
  const Stopwatch watch;
  Place place;
  {
    std::unique_lock lock(mutex_);
    const bool came = ready_.wait_for(lock, options_.timeout, [&] { return place_of(taken_).ready; });
    if (!came)
      throw DataError({.what = concat("no batch after ", human_seconds(watch.seconds())),
                       .here = concat("batch ", taken_, " of this epoch, ", options_.workers, " workers"),
                       .likely = "a disk or network file system that does not answer",
                       .next = "look at the storage; a longer timeout helps where it is only slow"});
    statistics += std::exchange(took_, {});
    statistics.queued += ready_count_;
    place = std::exchange(place_of(taken_), {});
    ++taken_;
    --ready_count_;
  }
  statistics.wait += watch.seconds();
  room_.notify_one();
  if (place.error) std::rethrow_exception(place.error);
  return receive(std::move(place.batch));
}

}  // namespace lockstep
