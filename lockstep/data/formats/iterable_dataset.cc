// SPDX-License-Identifier: Apache-2.0
#include <c10/util/ScopeExit.h>

#include <algorithm>
#include <mutex>
#include <utility>

#include "lockstep/base/text.h"
#include "lockstep/datasets.h"
#include "lockstep/error.h"

namespace lockstep {

struct IterableDataset::State {
  // One that a worker has left. A worker that comes takes the one that is the least behind, so there are as many
  // streams as workers, and each goes forward.
  struct Opened {
    Stream stream;
    int64_t epoch = 0;
    int64_t place = 0;  // of the next sample
  };

  static constexpr size_t kMostIdle = 8;  // with these, a new stream drops the one that was idle the longest

  std::string name;
  int64_t samples;
  Open open;
  std::mutex mutex{};              // not held while a stream is opened, read or destroyed
  std::vector<Opened> idle{};      // guarded by the mutex
  std::optional<Batch> nothing{};  // guarded by the mutex: a batch without samples

  Opened opened(int64_t epoch) const {
    Stream stream = open(epoch);
    if (!stream)
      throw UsageError({.what = concat("open() of ", name, " returned an empty function for epoch ", epoch),
                        .next = "return a function that gives the next sample"});
    return {std::move(stream), epoch};
  }

  // Where none can be used one is dropped that an older epoch has left, or that is one too many.
  std::optional<Opened> take_idle(int64_t epoch, int64_t index) {
    std::optional<Opened> dropped;  // destroyed behind the lock
    const std::lock_guard lock(mutex);
    const auto take = [this](auto place) {
      Opened taken = std::move(*place);
      idle.erase(place);
      return taken;
    };
    auto best = idle.end();
    for (auto each = idle.begin(); each != idle.end(); ++each)
      if (each->epoch == epoch && each->place <= index && (best == idle.end() || each->place > best->place))
        best = each;
    if (best != idle.end()) return take(best);
    auto old = std::ranges::find_if(idle, [epoch](const Opened& each) { return each.epoch < epoch; });
    if (old == idle.end() && idle.size() >= kMostIdle) old = idle.begin();
    if (old != idle.end()) dropped = take(old);
    return std::nullopt;
  }

  void put_back(Opened& opened) {
    const std::lock_guard lock(mutex);
    if (opened.place < samples) idle.push_back(std::move(opened));
  }

  // Bad samples that others take, or have taken, are theirs to report.
  Batch read(Opened& opened, int64_t index) const {
    if (opened.place > index)
      throw UsageError({.what = concat("sample ", index, " of ", name, " is asked for after sample ", opened.place - 1),
                        .likely = "a LoaderOptions::order, or a shuffled part of the dataset",
                        .next = "leave the order to the stream"});
    while (opened.place < index) {
      try {
        next(opened);
      } catch (const DataError&) {
        continue;
      }
    }
    return next(opened);
  }

  // A sample that throws is over, too. An end is no DataError: skip_bad must not pass over it.
  Batch next(Opened& opened) const {
    const int64_t place = opened.place++;
    if (std::optional<Batch> sample = opened.stream()) return std::move(*sample);
    opened.place = samples;
    throw UsageError({.what = concat(name, " ended after ", place, " of ", samples, " samples"),
                      .here = concat("epoch ", opened.epoch),
                      .next = "give IterableDataset as many samples as each of its streams has"});
  }

  // Of the shape of the first sample that is not bad.
  Batch without_samples(int64_t epoch) {
    {
      const std::lock_guard lock(mutex);
      if (nothing) return *nothing;
    }
    Opened stream = opened(epoch);
    for (;;) {
      try {
        const Batch one = stacked({next(stream)});
        const std::lock_guard lock(mutex);
        return nothing.emplace(one.rows(0, 0));
      } catch (const DataError&) {
        if (stream.place >= samples) throw;
      }
    }
  }
};

IterableDataset::IterableDataset(std::string name, int64_t samples, Open open)
    : state_(new State{.name = std::move(name), .samples = samples, .open = std::move(open)}) {
  if (samples < 1 || !state_->open)
    throw UsageError(
        {.what = concat("an IterableDataset of ", samples, " samples", state_->open ? "" : " without open()"),
         .next = "give the samples of an epoch, and a function that opens a stream"});
}

std::string IterableDataset::name() const { return state_->name; }
int64_t IterableDataset::size() const { return state_->samples; }

SampleOrderPtr IterableDataset::shuffled_order() const { return sequential_order(size()); }

Batch IterableDataset::assemble(const BatchRequest& request) const {
  if (request.indices.empty()) return state_->without_samples(request.epoch);
  auto found = state_->take_idle(request.epoch, request.indices.front());
  State::Opened opened = found ? std::move(*found) : state_->opened(request.epoch);
  const auto put_back = c10::make_scope_exit([&] { state_->put_back(opened); });
  std::vector<Batch> samples;
  for (const int64_t index : request.indices) samples.push_back(state_->read(opened, index));
  return stacked(samples);
}

}  // namespace lockstep
