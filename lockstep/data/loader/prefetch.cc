// SPDX-License-Identifier: Apache-2.0
#include "lockstep/data/loader/prefetch.h"

#include <algorithm>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <optional>
#include <utility>

#include "lockstep/base/log.h"
#include "lockstep/base/text.h"
#include "lockstep/base/to_size.h"
#include "lockstep/data/loader/device_copy.h"
#include "lockstep/deadline.h"
#include "lockstep/error.h"
#include "lockstep/observe/phase_scope.h"
#include "lockstep/observe/trace.h"

namespace lockstep {

// The queue between the workers and the training thread: a ring of `prefetch` slots; the batch of step s goes to slot
// s % prefetch. Workers claim steps in order, and a step only when its slot is free, that is, when step s - prefetch
// was taken: claimed_ <= taken_ + prefetch. So two workers never share a slot, batches wait for each other in any
// order of completion, and next() takes them in order. A claimed step is always put, as a batch or as an exception, so next()
// can't wait for a step that no worker loads. All fields below mutex_ are guarded by it.
class Prefetcher::Shared {
 public:
  Shared(const LoaderOptions& options, const LoaderPlace& place, int64_t steps, Load load)
      : options_(options),
        place_(place),
        steps_(steps),
        load_(std::move(load)),
        slots_(to_size(options.prefetch)),
        running_(options.workers) {}

  void work() {
    const auto stream = copy_stream(place_.device);
    bool pinned = place_.cores.empty();
    for (;;) {
      LoadingStatistics took;
      const auto step = claim(took);
      if (!step) break;
      Slot slot;
      try {
        if (!std::exchange(pinned, true)) pin_this_thread(place_.cores);
        const trace::Span span("load batch", *step);
        Batch batch = load_(*step, took);
        const Stopwatch watch;
        slot.batch = start_copy(std::move(batch), stream);
        took.copy += watch.seconds();
      } catch (...) {
        slot.error = std::current_exception();
      }
      put(*step, std::move(slot), took);
    }
    const std::lock_guard lock(mutex_);
    --running_;
    ended_.notify_all();
  }

  Batch next(LoadingStatistics& statistics) {
    const PhaseScope loading(Phase::kLoading, "wait for batch", taken_);
    const Stopwatch watch;
    Slot slot;
    {
      std::unique_lock lock(mutex_);
      wait_for_batch(lock, watch);
      statistics += std::exchange(took_, {});
      const auto ready = std::ranges::count(slots_, true, &Slot::ready);
      statistics.queued += static_cast<double>(ready);
      trace::count("batches ready", ready);
      slot = std::exchange(slot_of(taken_), {});
      ++taken_;
    }
    statistics.wait += watch.seconds();
    room_.notify_one();
    if (slot.error) std::rethrow_exception(slot.error);
    return receive(std::move(slot.batch));
  }

  Batch load_here(LoadingStatistics& statistics) {
    const PhaseScope loading(Phase::kLoading, "load batch", taken_);
    const Stopwatch watch;
    Batch batch = receive(start_copy(load_(taken_, statistics), copy_stream(place_.device)));
    ++taken_;
    statistics.wait += watch.seconds();
    return batch;
  }

  // Ends the workers; false: some were still loading at the deadline.
  bool stop() {
    constexpr std::chrono::milliseconds kOnceMore = std::chrono::seconds(1);  // for workers that were late already
    std::unique_lock lock(mutex_);
    stopped_ = true;
    room_.notify_all();
    return ended_.wait_for(lock, late_ ? std::min(kOnceMore, timeout_) : timeout_, [&] { return running_ == 0; });
  }

 private:
  struct Slot {
    bool ready = false;
    CopiedBatch batch;
    std::exception_ptr error;
  };

  // Blocks until the next batch is ready.
  void wait_for_batch(std::unique_lock<std::mutex>& lock, const Stopwatch& watch) {
    const auto& look = options_.while_waiting;
    const auto turn = look ? std::min(kBetweenLooks, timeout_) : timeout_;
    while (!ready_.wait_for(lock, turn, [&] { return slot_of(taken_).ready; })) {
      if (!look || watch.seconds() >= std::chrono::duration<double>(timeout_).count()) no_batch_came(watch);
      late_ = true;  // if it throws
      lock.unlock();
      look();
      lock.lock();
      late_ = false;
    }
  }

  Slot& slot_of(int64_t step) { return slots_[to_size(step) % slots_.size()]; }

  // The next step, once its slot is free; nothing when all steps are claimed or the epoch is stopped. Without a
  // deadline: a worker without work waits as long as the training thread computes, and stop() wakes it.
  std::optional<int64_t> claim(LoadingStatistics& took) {
    const Stopwatch watch;
    std::unique_lock lock(mutex_);
    room_.wait(lock, [&] { return stopped_ || claimed_ == steps_ || claimed_ < taken_ + std::ssize(slots_); });
    took.room += watch.seconds();
    if (stopped_ || claimed_ == steps_) return std::nullopt;
    return claimed_++;
  }

  void put(int64_t step, Slot slot, const LoadingStatistics& took) {
    {
      const std::lock_guard lock(mutex_);
      slot.ready = true;
      slot_of(step) = std::move(slot);
      took_ += took;
    }
    ready_.notify_one();
  }

  [[noreturn]] void no_batch_came(const Stopwatch& watch) {
    late_ = true;
    throw DataError({.what = concat("no batch after ", human_seconds(watch.seconds())),
                     .here = concat("batch ", taken_, " of this epoch, ", options_.workers, " workers"),
                     .likely = "a disk, a network file system or a stream that does not answer",
                     .next = "check the storage; if it is only slow, raise LoaderOptions::timeout"});
  }

  static constexpr std::chrono::milliseconds kBetweenLooks{100};
  const LoaderOptions options_;
  const LoaderPlace place_;
  const int64_t steps_;
  const std::chrono::milliseconds timeout_ = std::min(options_.timeout, Deadline::kLongest);
  const Load load_;
  std::mutex mutex_;
  std::condition_variable ready_;  // a batch was put
  std::condition_variable room_;   // a batch was taken, or the epoch was stopped
  std::condition_variable ended_;  // a worker has ended
  std::vector<Slot> slots_;
  int64_t claimed_ = 0;  // steps that workers have claimed
  int64_t taken_ = 0;    // steps that next() has returned
  int running_;          // workers
  bool stopped_ = false;
  bool late_ = false;       // a batch did not come within the timeout
  LoadingStatistics took_;  // by workers, since next() was called last
};

Prefetcher::Prefetcher(const LoaderOptions& options, const LoaderPlace& place, int64_t steps, Load load)
    : shared_(std::make_shared<Shared>(options, place, steps, std::move(load))) {
  for (int i = 0; i < options.workers; ++i) workers_.emplace_back([shared = shared_] { shared->work(); });
}

Prefetcher::~Prefetcher() {
  if (!process_.is_here()) {  // a forked child has no workers
    leave_to_parent(workers_);
    leave_to_parent(shared_);
    return;
  }
  const bool all_ended = shared_->stop();
  if (!all_ended) log_warning("a worker still waits for the storage and is left behind; it ends when that answers");
  for (std::thread& worker : workers_)
    if (all_ended)
      worker.join();  // its last statement is over, or nearly
    else
      worker.detach();  // it holds the queue, and through `load` the dataset
}

Batch Prefetcher::next(LoadingStatistics& statistics) {
  return workers_.empty() ? shared_->load_here(statistics) : shared_->next(statistics);
}

}  // namespace lockstep
