#include "lockstep/strategy/kvstore/server_table.h"

#include <algorithm>
#include <cmath>

#include "lockstep/strategy/devices/replica.h"
#include "lockstep/strategy/kvstore/device_sum.h"

namespace lockstep {

void ServerTable::create(BlockLayout layout, int workers) {
  layout_ = std::move(layout);
  inboxes_.resize(static_cast<std::size_t>(workers));
  values_ = torch::zeros({layout_.bytes()}, torch::kUInt8);
  sums_ = torch::zeros({layout_.bytes()}, torch::kUInt8);
  for (const KeySlice& place : layout_.slices())
    slices_.push_back({.place = place,
                       .value = place.in(values_),
                       .notes = std::vector<Note>(inboxes_.size()),
                       .read_at = std::vector<std::int64_t>(inboxes_.size())});
}

void ServerTable::set_optimizer(const StrategyOptions& options) {
  std::vector<torch::Tensor> trained;
  for (const Slice& slice : slices_)
    if (slice.place.trained != 0) trained.push_back(slice.value);
  optimizer_ = make_optimizer(std::move(trained), options);
}

std::span<ServerTable::Slice> ServerTable::in(SliceRange range) {
  return std::span(slices_).subspan(static_cast<std::size_t>(range.first), static_cast<std::size_t>(range.size()));
}

std::span<const ServerTable::Slice> ServerTable::in(SliceRange range) const {
  return const_cast<ServerTable*>(this)->in(range);
}

void ServerTable::note(int worker, SliceRange slices, const std::vector<bool>& given, std::int64_t samples) {
  auto is_given = given.begin();
  for (Slice& slice : in(slices))
    slice.notes[static_cast<std::size_t>(worker)] = {.noted = true, .given = *is_given++, .samples = samples};
}

bool ServerTable::holds_any(int worker, SliceRange slices) const {
  return std::ranges::any_of(
      in(slices), [worker](const Slice& slice) { return slice.notes[static_cast<std::size_t>(worker)].noted; });
}

int ServerTable::first_without(int worker, SliceRange slices) const {
  for (const Slice& slice : in(slices))
    for (std::size_t other = 0; other < slice.notes.size(); ++other)
      if (slice.notes[static_cast<std::size_t>(worker)].noted && !slice.notes[other].noted)
        return static_cast<int>(other);
  return worker;
}

void ServerTable::merge_complete(SliceRange slices, const std::vector<int>& workers, double learning_rate) {
  for (Slice& slice : in(slices)) {
    const bool complete =
        std::ranges::all_of(workers, [&](int worker) { return slice.notes[static_cast<std::size_t>(worker)].noted; });
    if (complete) take(slice, merged(slice, workers));
  }
  update(learning_rate);
}

// Forgets the notes. Undefined if nobody has given a value.
torch::Tensor ServerTable::merged(Slice& slice, const std::vector<int>& workers) {
  std::vector<Term> terms;
  std::vector<torch::Tensor> given;
  std::int64_t samples = 0;
  for (const int worker : workers) {
    Note& note = slice.notes[static_cast<std::size_t>(worker)];
    samples += note.samples;
    if (note.given && note.samples > 0) {
      given.push_back(slice.place.in(inbox(worker)));
      terms.push_back({given.back().const_data_ptr(), static_cast<double>(note.samples)});
    }
    note = {};
  }
  if (terms.empty()) return {};
  if (!slice.value.is_floating_point()) return given.front();
  if (terms.size() == 1 && terms.front().weight == static_cast<double>(samples)) return given.front();
  for (Term& term : terms) term.weight /= static_cast<double>(samples);
  const torch::Tensor sum = slice.place.in(sums_);
  weighted_sum_into(sum, terms);
  return sum;
}

// A gradient waits for update(); another value is there at once.
void ServerTable::take(Slice& slice, const torch::Tensor& value) {
  if (!value.defined()) return;
  if (optimizer_ == nullptr || slice.place.trained == 0) {
    slice.value.copy_(value);
    if (slice.place.trained == 0) return;
  } else {
    slice.value.mutable_grad() = value;
  }
  changed_.push_back(&slice);
}

void ServerTable::update(double learning_rate) {
  if (changed_.empty()) return;
  if (optimizer_ != nullptr) {
    if (!std::isnan(learning_rate)) set_learning_rate(*optimizer_, learning_rate);
    optimizer_->step();
  }
  for (Slice* const slice : changed_) {
    slice->value.mutable_grad() = torch::Tensor();
    ++slice->updates;
  }
  changed_.clear();
}

std::int64_t ServerTable::delay(int worker, SliceRange slices) const {
  std::int64_t most = 0;
  for (const Slice& slice : in(slices))
    most = std::max(most, slice.updates - slice.read_at[static_cast<std::size_t>(worker)]);
  return most;
}

void ServerTable::mark_read(int worker, SliceRange slices) {
  for (Slice& slice : in(slices)) slice.read_at[static_cast<std::size_t>(worker)] = slice.updates;
}

Optimizer::StateTensors ServerTable::state_of(std::size_t slice) const {
  if (optimizer_ == nullptr || slices_[slice].place.trained == 0) return {};
  return optimizer_->state_of(slices_[slice].value);
}

void ServerTable::set(std::size_t slice, const torch::Tensor& value, const Optimizer::StateTensors& state) {
  slices_[slice].value.copy_(value);
  if (optimizer_ != nullptr && slices_[slice].place.trained != 0) optimizer_->set_state(slices_[slice].value, state);
}

}  // namespace lockstep
