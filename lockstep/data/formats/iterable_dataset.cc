// SPDX-License-Identifier: Apache-2.0
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
    Stream next;
    int64_t epoch = 0;
    int64_t place = 0;  // of the next sample
  };

  std::string name;
  int64_t samples;
  Open open;
  std::mutex mutex{};
  std::vector<Opened> idle{};  // guarded by the mutex

  Opened at(int64_t epoch, int64_t index) {
    if (auto found = take_idle(epoch, index)) return std::move(*found);
    return {.next = open(epoch), .epoch = epoch};
  }

  // Drops one that can't be used, if none can.
  std::optional<Opened> take_idle(int64_t epoch, int64_t index) {
    const std::lock_guard lock(mutex);
    if (idle.empty()) return std::nullopt;
    const auto usable = [&](const Opened& each) { return each.epoch == epoch && each.place <= index; };
    auto best = idle.begin();
    for (auto each = idle.begin(); each != idle.end(); ++each)
      if (usable(*each) && (!usable(*best) || each->place > best->place)) best = each;
    std::optional<Opened> taken;
    if (usable(*best)) taken = std::move(*best);
    idle.erase(best);
    return taken;
  }

  Batch read(Opened& stream, int64_t index) const {
    if (stream.place > index)
      throw UsageError({.what = concat("sample ", index, " of ", name, " is asked for after sample ", stream.place - 1),
                        .likely = "a LoaderOptions::order, or a shuffled part of the dataset",
                        .next = "leave the order to the stream"});
    for (;;) {
      std::optional<Batch> sample = stream.next();
      if (!sample)
        throw DataError({.what = concat(name, " ended after ", stream.place, " of ", samples, " samples"),
                         .here = concat("epoch ", stream.epoch),
                         .next = "give IterableDataset as many samples as each of its streams has"});
      if (stream.place++ == index) return std::move(*sample);
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

std::shared_ptr<const SampleOrder> IterableDataset::shuffled_order() const { return sequential_order(size()); }

Batch IterableDataset::assemble(const BatchRequest& request) const {
  if (request.indices.empty()) {  // of the samples' shape
    const int64_t first = 0;
    return assemble({.indices = {&first, 1}, .epoch = request.epoch}).rows(0, 0);
  }
  State::Opened stream = state_->at(request.epoch, request.indices.front());
  std::vector<Batch> samples;
  for (const int64_t index : request.indices) samples.push_back(state_->read(stream, index));
  const std::lock_guard lock(state_->mutex);
  state_->idle.push_back(std::move(stream));
  return stacked(samples);
}

}  // namespace lockstep
