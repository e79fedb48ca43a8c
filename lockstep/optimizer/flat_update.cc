// SPDX-License-Identifier: Apache-2.0
#include "lockstep/optimizer/flat_update.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <span>

#include "lockstep/base/cache_line.h"
#include "lockstep/base/defects.h"
#include "lockstep/optimizer/mean.h"
#include "lockstep/optimizer/rule.h"

namespace lockstep {
namespace {

constexpr std::int64_t kChunksPerTask = 8;  // of a thread

template <class T>
double square_norm(const T* values, std::int64_t count) {
  double sum = 0;
  for (std::int64_t i = 0; i < count; ++i) sum += static_cast<double>(values[i]) * static_cast<double>(values[i]);
  return sum;
}

template <class T>
void scale_and_clamp(T* __restrict gradient, std::int64_t count, double factor, double max_value) {
  const T scale = static_cast<T>(factor);
  const T limit = max_value > 0 ? static_cast<T>(max_value) : std::numeric_limits<T>::infinity();
  for (std::int64_t i = 0; i < count; ++i) gradient[i] = std::clamp(scale * gradient[i], -limit, limit);
}

template <class T>
void move_average(const T* average, const T* values, std::int64_t count, double decay, T* new_average) {
  const T rest = static_cast<T>(1 - decay);
#pragma GCC ivdep
  for (std::int64_t i = 0; i < count; ++i) new_average[i] = average[i] + rest * (values[i] - average[i]);
}

template <class To, class From>
void convert(const From* __restrict from, std::int64_t count, To* __restrict to) {
  for (std::int64_t i = 0; i < count; ++i) to[i] = static_cast<To>(from[i]);
}

// Takes the values of a 16-bit parameter where they are not the rounded master: they were written since the last step, from a
// checkpoint or before the first one.
template <class T, class Stored>
void follow_stored(const Stored* stored, std::int64_t count, T* master) {
  for (std::int64_t i = 0; i < count; ++i)
    if (static_cast<Stored>(master[i]) != stored[i]) master[i] = stored[i];
}

template <class T>
T* target(const Targets& to, std::size_t which) {
  return reinterpret_cast<T*>(to[which].data());
}

// The threads of a rank that finishes a step: it has one redo slot for certain.
void on_calling_thread(std::int64_t begin, std::int64_t end, std::int64_t,
                       const std::function<void(std::int64_t, std::int64_t)>& part) {
  part(begin, end);
}

}  // namespace

// Note [The fused pass]
// All ranks run the step at the same time. Each reads the gradients of all ranks, and writes parameters, state and
// scratch memory of its own chunks only, so no element has two writers and the result does not depend on timing.
//
// Without norms there is one pass and no barrier: for each own chunk, sum the gradients into a buffer on the stack,
// apply the rule to parameter and state, store.
//
// With norms (clipping by norm, loss scaling, layerwise rules) nothing may be updated before all gradients are known:
//   kReduce   own chunks: the mean gradient into scratch memory, the square of its norm into norms_
//             barrier: all norms are written
//             every rank adds up the norms of all chunks in their order, and so decides the same
//   kDirect   layerwise rules: own chunks: the direction into scratch memory, norms into norms_
//             barrier, then every rank computes the same trust ratio of each parameter
//   kUpdate   own chunks: apply the rule
// norms_ needs no third barrier: the two phases write different fields, and the next step writes only after
// GradientSource::end_update(), which every rank calls when it has read them.
//
// Where other processes may have to finish the step, they run the same passes, over the same memory, and leave out what the
// journal marks as done (journal_writer.h).
bool FlatUpdate::complete(const UpdateStep& step) {
  if (!step.loss_scale && step.clipping.max_norm <= 0 && !step.rule.layerwise()) {
    count_steps();
    run_pass(step, Pass::kReduceAndUpdate);
    return true;
  }
  make_room_for_norms();
  make_scratch_memory();
  run_pass(step, Pass::kReduce);
  memory_->barrier(signature_of(StepPhase::kNorms, number_));
  find_norm();
  if (step.loss_scale && !std::isfinite(gradient_norm_) && !defect("an overflow is not seen")) return false;
  count_steps();
  if (step.rule.layerwise()) {
    run_pass(step, Pass::kDirect);
    memory_->barrier(signature_of(StepPhase::kTrustRatios, number_));
    find_trust_ratios(step);
  }
  run_pass(step, Pass::kUpdate);
  return true;
}

// Works on this rank's chunks of parameters that are updated in this step, on several threads. Leaves out those that have gone
// through the pass's phase in this step, and reduces none for which nothing is left to do.
void FlatUpdate::run_pass(const UpdateStep& step, Pass pass) {
  const bool directs = pass == Pass::kDirect || (pass == Pass::kReduce && step.rule.layerwise());
  const ChunkPhase phase = directs ? ChunkPhase::kDirected : ChunkPhase::kUpdated;
  journal_.begin_pass();
  step.gradients.parallel_for(first_, last_, kChunksPerTask, [&](std::size_t from, std::size_t to) {
    RedoSlot* const slot = journal_.begin_thread();
    for (std::size_t i = from; i < to; ++i) {
      const std::size_t parameter = chunks_[i].parameter;
      if (!is_updated_[parameter] || journal_.is_done(i, phase)) continue;
      if (state_dtype(state_.parameters[parameter]) == torch::kFloat64)
        work_on<double>(step, pass, i, slot);
      else
        work_on<float>(step, pass, i, slot);
    }
  });
}

// T is the type that the parameter is computed in.
template <class T>
void FlatUpdate::work_on(const UpdateStep& step, Pass pass, std::size_t i, RedoSlot* slot) {
  const Chunk& chunk = chunks_[i];
  if (pass == Pass::kReduceAndUpdate) {
    alignas(kCacheLine) T gradient[kMaxChunk];
    sum_gradients(step, chunk, gradient);
    if (step.clipping.max_value > 0) scale_and_clamp(gradient, chunk.count, 1, step.clipping.max_value);
    return update(step, i, slot, gradient, /*trust=*/1);
  }
  T* const gradient = scratch<T>(i);
  if (pass == Pass::kReduce) {
    sum_gradients(step, chunk, gradient);
    norms_[i].gradient = square_norm(gradient, chunk.count);
  } else if (pass == Pass::kDirect) {
    const double factor = defect("layerwise rules are not clipped") ? 1 : clip_factor(step.clipping);
    scale_and_clamp(gradient, chunk.count, factor, step.clipping.max_value);
    direct(step, i, slot, gradient);
  } else {
    const double factor = clip_factor(step.clipping);
    if (!step.rule.layerwise()) scale_and_clamp(gradient, chunk.count, factor, step.clipping.max_value);
    const bool trusts = step.rule.layerwise() && !defect("the trust ratio is dropped");
    update(step, i, slot, gradient, trusts ? trust_[chunk.parameter] : 1);
  }
}

// mean[i]: the weighted sum over all sources, the loss scale divided out.
template <class T>
void FlatUpdate::sum_gradients(const UpdateStep& step, const Chunk& chunk, T* mean) const {
  const auto& [weights, pointers, parallel_for] = step.gradients;
  const double scale = defect("the loss scale is dropped") ? 1 : step.loss_scale.value_or(1);
  thread_local std::vector<Term> terms;
  terms.clear();
  for (std::size_t s = 0; s < weights.size(); ++s)
    terms.push_back({pointers[chunk.parameter * weights.size() + s], weights[s] / scale});
  weighted_sum<T>(terms, state_.parameters[chunk.parameter].scalar_type(), chunk.begin, chunk.count, mean);
}

// Turns the gradient of a chunk into the rule's direction.
template <class T>
void FlatUpdate::direct(const UpdateStep& step, std::size_t i, RedoSlot* slot, T* gradient) {
  const Chunk& chunk = chunks_[i];
  const JournalWriter::Part part{.slot = slot,
                                 .elements = {i, 0, chunk.count},
                                 .mark = journal_.mark_of(ChunkPhase::kDirected, chunk.count, chunk.count),
                                 .targets = targets_of(step.rule, ChunkPhase::kDirected, chunk)};
  const Elements<T> elements = elements_of(chunk, gradient, /*trust=*/1, journal_.begin_part(part));
  step.rule.direct(group_of(step, chunk), elements);
  norms_[i].parameter = square_norm(elements.parameter, chunk.count);
  norms_[i].direction = square_norm(gradient, chunk.count);
  journal_.end_part(part);
}

// Updates a chunk, part by part.
template <class T>
void FlatUpdate::update(const UpdateStep& step, std::size_t i, RedoSlot* slot, T* gradient, double trust) {
  const Chunk& chunk = chunks_[i];
  const std::int64_t most = journal_.part_elements();
  for (std::int64_t begin = journal_.first_element(i, ChunkPhase::kUpdated); begin < chunk.count; begin += most) {
    const Chunk range{chunk.parameter, chunk.begin + begin, std::min(most, chunk.count - begin)};
    const JournalWriter::Part part{
        .slot = slot,
        .elements = {i, begin, range.count},
        .mark = journal_.mark_of(ChunkPhase::kUpdated, begin + range.count, chunk.count),
        .targets = targets_of(step.rule, ChunkPhase::kUpdated, range)};
    const Targets to = journal_.begin_part(part);
    apply_rule(step, range, elements_of(range, gradient + begin, trust, to), to);
    journal_.end_part(part);
  }
}

// Applies the rule, then follows with the average and the 16-bit values.
template <class T>
void FlatUpdate::apply_rule(const UpdateStep& step, const Chunk& range, const Elements<T>& elements, const Targets& to) {
  step.rule.update(group_of(step, range), elements);
  const T* const values = elements.new_parameter;
  if (!state_.averages.empty() && elements.step == 1)
    std::copy_n(values, range.count, target<T>(to, kAverage));
  else if (!state_.averages.empty())
    move_average(part_of<T>(state_.averages, range), values, range.count, state_.ema_decay, target<T>(to, kAverage));
  const torch::ScalarType dtype = state_.parameters[range.parameter].scalar_type();
  if (dtype == torch::kBFloat16) convert(values, range.count, target<c10::BFloat16>(to, kStored));
  if (dtype == torch::kFloat16) convert(values, range.count, target<c10::Half>(to, kStored));
}

template <class T>
Elements<T> FlatUpdate::elements_of(const Chunk& range, T* gradient, double trust, const Targets& to) {
  Elements<T> elements{.count = range.count,
                       .parameter = values<T>(range),
                       .gradient = gradient,
                       .step = state_.steps[range.parameter],
                       .trust = trust};
  for (std::size_t s = 0; s < state_.arrays.size(); ++s) {
    elements.state[s] = part_of<T>(state_.arrays[s], range);
    elements.new_state[s] = to[s].empty() ? elements.state[s] : target<T>(to, s);
  }
  if (!to[kValues].empty()) elements.new_parameter = target<T>(to, kValues);
  return elements;
}

// The values that the rule updates: the parameter itself, or the float32 master of a 16-bit one.
template <class T>
T* FlatUpdate::values(const Chunk& range) {
  const torch::ScalarType dtype = state_.parameters[range.parameter].scalar_type();
  if (!is_16_bit(state_.parameters[range.parameter])) return part_of<T>(state_.parameters, range);
  T* const master = part_of<T>(state_.masters, range);
  if (dtype == torch::kBFloat16) follow_stored(part_of<c10::BFloat16>(state_.parameters, range), range.count, master);
  if (dtype == torch::kFloat16) follow_stored(part_of<c10::Half>(state_.parameters, range), range.count, master);
  return master;
}

// The arrays are written in the phase in which the rule writes its state, everything else by the update.
Targets FlatUpdate::targets_of(const UpdateRule& rule, ChunkPhase phase, const Chunk& range) const {
  Targets targets;
  const auto in = [&](const std::vector<torch::Tensor>& list) {
    const std::size_t size = list[range.parameter].element_size();
    return std::span(static_cast<std::byte*>(list[range.parameter].mutable_data_ptr()) + range.begin * size,
                     range.count * size);
  };
  if (rule.directs_with_state() == (phase == ChunkPhase::kDirected))
    for (std::size_t s = 0; s < state_.arrays.size(); ++s) targets[s] = in(state_.arrays[s]);
  if (phase == ChunkPhase::kDirected) return targets;
  if (!state_.averages.empty()) targets[kAverage] = in(state_.averages);
  const bool has_master = is_16_bit(state_.parameters[range.parameter]);
  targets[kValues] = in(has_master ? state_.masters : state_.parameters);
  if (has_master) targets[kStored] = in(state_.parameters);
  return targets;
}

// ---- Steps

FlatUpdate::FlatUpdate(std::shared_ptr<SharedMemory> memory, OptimizerState& state, int sharers)
    : memory_(std::move(memory)),
      state_(state),
      chunks_(cut_into_chunks(state.parameters)),
      first_(first_chunk_of(memory_->rank(), sharers, chunks_)),
      last_(first_chunk_of(memory_->rank() + 1, sharers, chunks_)),
      is_updated_(state.parameters.size()),
      journal_(state) {
  for (const torch::Tensor& parameter : state.parameters)
    chunk_bytes_ = std::max(chunk_bytes_, kMaxChunk * c10::elementSize(state_dtype(parameter)));
}

FlatUpdate::FlatUpdate(std::shared_ptr<SharedMemory> memory, OptimizerState& state, const JournalOptions& journal)
    : FlatUpdate(memory, state, memory->size()) {
  state.make_lists([&](Wanted wanted) { return arrays_beside(state.parameters, *memory_, wanted); });
  if (journal.kept_sources == 0) return;
  make_room_for_norms();
  UpdateMemory beside{.norms = std::as_bytes(std::span(norms_.get(), chunks_.size()))};
  if (journal.layerwise) {
    scratch_ = memory_->allocate_common(chunks_.size() * chunk_bytes_);
    beside.directions = std::span(scratch_.get(), chunks_.size() * chunk_bytes_);
  }
  journal_.keep(memory_, journal, chunks_.size(), beside);
}

bool FlatUpdate::run(const UpdateStep& step) {
  ++number_;
  find_updated(step.gradients);
  journal_.begin_step(number_, step, is_updated_);
  const bool updated = complete(step);
  if (!updated) journal_.skip_step();
  return updated;
}

std::uint64_t FlatUpdate::finish(std::shared_ptr<SharedMemory> memory, InterruptedUpdate& lost) {
  const std::optional<StepRecord> record = UpdateJournal(lost.journal, lost.shape).newest();
  if (!record) return 0;
  lost.state.steps = record->steps;
  if (record->skipped) return record->step;
  WeightedGradients gradients{.weights = record->weights, .parallel_for = on_calling_thread};
  for (std::size_t i = 0; const std::uint64_t word : record->gradients) {
    const std::size_t bytes = lost.state.parameters[i++ / record->weights.size()].nbytes();
    gradients.pointers.push_back(word == kNoPlace ? nullptr : lost.find(place_of_word(word), bytes));
  }
  std::vector<UpdateRule::Group> groups;
  for (const OptimizerOptions& options : record->options)
    groups.push_back(std::visit([](const auto& values) { return parameter_group({}, values); }, options));
  const auto rule = rule_of(record->options.front());
  UpdateStep step{*rule, groups, gradients, record->clipping};
  if (!std::isnan(record->loss_scale)) step.loss_scale = record->loss_scale;
  FlatUpdate(std::move(memory), lost, record->step).finish(step);
  return record->step;
}

void FlatUpdate::finish(const UpdateStep& step) {
  journal_.put_ready_parts(first_, last_, [&](const ChunkPart& part, ChunkPhase phase) {
    const Chunk& chunk = chunks_[part.chunk];
    return targets_of(step.rule, phase, {chunk.parameter, chunk.begin + part.begin, part.count});
  });
  memory_->barrier();
  find_updated(step.gradients);
  complete(step);
  memory_->barrier();
}

// Over the memory that the lost ranks have left, of which each rank takes the place of one.
FlatUpdate::FlatUpdate(std::shared_ptr<SharedMemory> memory, InterruptedUpdate& lost, std::uint64_t step)
    : FlatUpdate(memory, lost.state, std::min(static_cast<int>(lost.shape.ranks), memory->size())) {
  norms_ = {std::shared_ptr<std::byte>(), reinterpret_cast<Norms*>(lost.norms)};
  if (lost.directions != nullptr) scratch_ = {std::shared_ptr<std::byte>(), lost.directions};
  number_ = step;
  journal_.resume(lost, std::min(memory_->rank(), static_cast<int>(lost.shape.ranks) - 1), step);
}

void FlatUpdate::find_updated(const WeightedGradients& gradients) {
  const auto sources = static_cast<std::ptrdiff_t>(gradients.weights.size());
  auto pointer = gradients.pointers.begin();
  for (char& is_updated : is_updated_) {
    is_updated = std::any_of(pointer, pointer + sources, [](const void* gradient) { return gradient != nullptr; });
    pointer += sources;
  }
}

void FlatUpdate::count_steps() {
  for (std::size_t i = 0; i < is_updated_.size(); ++i) state_.steps[i] += is_updated_[i] ? 1 : 0;
}

void FlatUpdate::find_norm() {
  double sum = 0;
  const bool slice = defect("a norm of one slice");
  for (std::size_t i = slice ? first_ : 0; i < (slice ? last_ : chunks_.size()); ++i)
    if (is_updated_[chunks_[i].parameter]) sum += norms_[i].gradient;
  gradient_norm_ = std::sqrt(sum);
}

// As torch::nn::utils::clip_grad_norm_.
double FlatUpdate::clip_factor(const ClippingOptions& clipping) const {
  return clipping.max_norm > 0 ? std::min(1.0, clipping.max_norm / (gradient_norm_ + 1e-6)) : 1;
}

void FlatUpdate::find_trust_ratios(const UpdateStep& step) {
  std::vector<double> parameter(is_updated_.size()), direction(is_updated_.size());
  for (std::size_t i = 0; i < chunks_.size(); ++i) {
    parameter[chunks_[i].parameter] += norms_[i].parameter;
    direction[chunks_[i].parameter] += norms_[i].direction;
  }
  trust_.resize(is_updated_.size());
  for (std::size_t i = 0; i < is_updated_.size(); ++i)
    trust_[i] =
        step.rule.trust_ratio(step.groups[state_.group_of[i]], std::sqrt(parameter[i]), std::sqrt(direction[i]));
}

// Collective, in the first step that needs norms.
void FlatUpdate::make_room_for_norms() {
  if (norms_ != nullptr) return;
  norms_ = std::reinterpret_pointer_cast<Norms[]>(
      memory_->allocate_common(std::max<std::size_t>(chunks_.size(), 1) * sizeof(Norms)));
}

// This rank's, unless others may have to go on from the directions in it.
void FlatUpdate::make_scratch_memory() {
  if (scratch_ != nullptr) return;
  scratch_ = SharedMemory::alone()->allocate((last_ - first_) * chunk_bytes_).data;
  first_in_scratch_ = first_;
}

}  // namespace lockstep
