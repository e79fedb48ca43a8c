// SPDX-License-Identifier: Apache-2.0
#include "lockstep/strategy/kvstore/server_table.h"

#include <cmath>

#include "lockstep/strategy/devices/replica.h"
#include "lockstep/strategy/kvstore/store.h"

namespace lockstep {

void ServerTable::create(BlockLayout layout, int workers) {
  layout_ = std::move(layout);
  inboxes_.resize(workers);
  values_ = torch::zeros({layout_.bytes()}, torch::kUInt8);
  sums_ = torch::zeros({layout_.bytes()}, torch::kUInt8);
  for (const KeySlice& place : layout_.slices())
    slices_.push_back({.place = place,
                       .value = place.in_block(values_),
                       .pushes = IntVector<Push>(workers),
                       .read_at = IntVector<std::int64_t>(workers)});
}

// Where values are 16-bit, an optimizer keeps their float32 originals: there can be only one.
void ServerTable::set_optimizer(const UpdateOptions& options, bool own_state) {
  std::vector<torch::Tensor> trained;
  bool wide = true;
  for (const Slice& slice : slices_) {
    if (!slice.place.trained) continue;
    trained.push_back(slice.value);
    wide = wide && slice.value.element_size() > 2;
  }
  const int count = own_state && wide ? inboxes_.size() : 1;
  for (int i = 0; i < count; ++i) optimizers_.push_back(make_optimizer(trained, options));
  learning_rate_ = values_of(options.optimizer).at("lr");
}

int ServerTable::first_missing(int worker, SliceRange slices) const {
  for (const Slice& slice : in(slices))
    for (int other = 0; other < slice.pushes.size(); ++other)
      if (slice.pushes[worker].unmerged && !slice.pushes[other].unmerged) return other;
  return worker;
}

void ServerTable::merge(SliceRange slices, Workers workers, UpdateRate rate) {
  for (Slice& slice : in(slices))
    if (std::ranges::all_of(workers, [&](int worker) { return slice.pushes[worker].unmerged; }))
      apply(slice, merged(slice, workers));
  update(workers.front(), rate);
}

// The mean over `workers`, weighted by samples: sum of m_j v_j / sum of m_j, where a worker without a value counts as
// zero. Undefined if no worker has one. Integers, such as counters of batches, are the first worker's. A value that has
// all the weight is taken from its inbox as it is: no pass over memory.
torch::Tensor ServerTable::merged(Slice& slice, Workers workers) {
  std::vector<Term> terms;
  std::vector<torch::Tensor> values;
  std::int64_t samples = 0;
  for (const int worker : workers) {
    const Push push = std::exchange(slice.pushes[worker], {});
    samples += push.samples;
    if (!push.has_value || push.samples == 0) continue;
    values.push_back(slice.place.in_block(inbox(worker)));
    terms.push_back({values.back().const_data_ptr(), static_cast<double>(push.samples)});
  }
  if (terms.empty()) return {};
  if (!slice.value.is_floating_point()) return values.front();
  const auto all = static_cast<double>(samples);
  if (terms.size() == 1 && terms.front().weight == all) return values.front();
  for (Term& term : terms) term.weight /= all;
  const torch::Tensor sum = slice.place.in_block(sums_);
  weighted_sum_into(sum, terms);
  return sum;
}

// A gradient waits for update(); another value is stored at once.
void ServerTable::apply(Slice& slice, const torch::Tensor& value) {
  if (!value.defined()) return;
  if (slice.place.trained && has_optimizer())
    slice.value.mutable_grad() = value;
  else
    slice.value.copy_(value);
  if (slice.place.trained) changed_.push_back(&slice);
}

// The optimizer skips parameters without a gradient, so one step() updates exactly the slices that were merged.
void ServerTable::update(int worker, UpdateRate rate) {
  if (changed_.empty()) return;
  if (has_optimizer()) {
    Optimizer& optimizer = *optimizers_[std::min(worker, optimizers_.size() - 1)];
    if (!std::isnan(rate.learning_rate)) learning_rate_ = rate.learning_rate;
    set_learning_rate(optimizer, rate.factor * learning_rate_);
    optimizer.step();
  }
  for (Slice* const slice : changed_) {
    slice->value.mutable_grad() = torch::Tensor();
    ++slice->updates;
  }
  changed_.clear();
}

Optimizer& ServerTable::most_advanced(const torch::Tensor& value) const {
  return **std::ranges::max_element(optimizers_, {}, [&value](const auto& optimizer) {
    const auto state = optimizer->state_of(value);
    return state.empty() ? 0 : state.at("step").template item<double>();
  });
}

std::vector<SliceState> ServerTable::states() const {
  std::vector<SliceState> all;
  for (const Slice& slice : slices_) {
    all.push_back({.place = slice.place, .value = slice.value.clone()});
    if (!has_optimizer() || !slice.place.trained) continue;
    for (const auto& [name, tensor] : most_advanced(slice.value).state_of(slice.value))
      all.back().state[name] = tensor.clone();
  }
  return all;
}

void ServerTable::set_states(const std::vector<SliceState>& states) {
  for (std::size_t i = 0; i < states.size(); ++i) {
    torch::Tensor& value = slices_[i].value;
    value.copy_(states[i].value);
    if (!slices_[i].place.trained) continue;
    for (const auto& optimizer : optimizers_) optimizer->set_state(value, states[i].state);
  }
}

}  // namespace lockstep
