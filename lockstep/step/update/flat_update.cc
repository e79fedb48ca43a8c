// SPDX-License-Identifier: Apache-2.0
#include "lockstep/step/update/flat_update.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <span>

#include "lockstep/base/cache_line.h"
#include "lockstep/base/to_size.h"
#include "lockstep/step/update/mean.h"
#include "lockstep/step/update/rule.h"

namespace lockstep {
namespace {

constexpr int64_t kChunksPerTask = 8;  // of a thread

template <class T>
double square_norm(const T* values, int64_t count) {
  double sum = 0;
  for (int64_t i = 0; i < count; ++i) sum += static_cast<double>(values[i]) * static_cast<double>(values[i]);
  return sum;
}

template <class T>
void scale_and_clamp(T* __restrict gradient, int64_t count, double factor, double max_value) {
  const T scale = static_cast<T>(factor);
  const T limit = max_value > 0 ? static_cast<T>(max_value) : std::numeric_limits<T>::infinity();
  for (int64_t i = 0; i < count; ++i) gradient[i] = std::clamp(scale * gradient[i], -limit, limit);
}

template <class T>
void move_average(const T* average, const T* values, int64_t count, double decay, T* new_average) {
  const T rest = static_cast<T>(1 - decay);
#pragma GCC ivdep
  for (int64_t i = 0; i < count; ++i) new_average[i] = average[i] + rest * (values[i] - average[i]);
}

template <class To, class From>
void convert(const From* __restrict from, int64_t count, To* __restrict to) {
  for (int64_t i = 0; i < count; ++i) to[i] = static_cast<To>(from[i]);
}

// Takes the values of a 16-bit parameter where they are not the rounded master: they were written since the last step, from a
// checkpoint or before the first one.
template <class T, class Stored>
void follow_stored(const Stored* stored, int64_t count, T* master) {
  for (int64_t i = 0; i < count; ++i)
    if (static_cast<Stored>(master[i]) != stored[i]) master[i] = stored[i];
}

template <class T>
T* in(const Targets& targets, size_t which) {
  return reinterpret_cast<T*>(targets.all[which].data());
}

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
// Other processes that finish the step run the same passes, over the same memory, and leave out what the journal marks as done
// (journal_writer.h).
class FusedUpdate : public FlatUpdate {
 public:
  FusedUpdate(SharedMemoryPtr memory, OptimizerState& state, const JournalOptions& journal)
      : FusedUpdate(memory, state, memory->size()) {
    state.make_lists([&](Wanted wanted) { return arrays_beside(state.parameters, *memory_, wanted); });
    norms_ = std::reinterpret_pointer_cast<Norms[]>(
        memory_->allocate_common(std::max<size_t>(chunks_.size(), 1) * sizeof(Norms)));
    if (journal.kept_sources == 0) return;
    UpdateMemory beside{.norms = std::as_bytes(std::span(norms_.get(), chunks_.size()))};
    if (journal.layerwise) {
      scratch_ = memory_->allocate_common(chunks_.size() * chunk_bytes_);
      beside.directions = std::span(scratch_.get(), chunks_.size() * chunk_bytes_);
    }
    journal_.keep(memory_, journal, chunks_.size(), beside);
  }

  // Works on the memory that the lost ranks have left; each rank takes the place of one of them.
  FusedUpdate(SharedMemoryPtr memory, InterruptedUpdate& lost, uint64_t step)
      : FusedUpdate(memory, lost.state, std::min(static_cast<int>(lost.shape.ranks), memory->size())) {
    norms_ = {std::shared_ptr<std::byte>(), reinterpret_cast<Norms*>(lost.norms)};
    if (lost.directions != nullptr) scratch_ = {std::shared_ptr<std::byte>(), lost.directions};
    journal_.resume(lost, std::min(memory_->rank(), static_cast<int>(lost.shape.ranks) - 1), step);
  }

  bool run(const UpdateStep& step) override {
    journal_.begin_step(step);
    find_updated(step.gradients);
    if (!step.loss_scale && step.clipping.max_norm <= 0 && !step.rule.layerwise()) {
      count_steps();
      run_pass(step, Pass::kReduceAndUpdate);
      return true;
    }
    make_scratch_memory();
    run_pass(step, Pass::kReduce);
    memory_->barrier(signature_of(StepPhase::kNorms, journal_.step()));
    find_norm();
    if (step.loss_scale && !std::isfinite(gradient_norm_)) {
      journal_.skip_step();
      return false;
    }
    count_steps();
    if (step.rule.layerwise()) {
      run_pass(step, Pass::kDirect);
      memory_->barrier(signature_of(StepPhase::kTrustRatios, journal_.step()));
      find_trust_ratios(step);
    }
    run_pass(step, Pass::kUpdate);
    return true;
  }

  void finish(const UpdateStep& step) {
    journal_.put_ready_parts(first_, last_, [&](const ChunkPart& part, ChunkPhase phase) {
      return part_of(step.rule, phase, /*slot=*/nullptr, part).targets;
    });
    memory_->barrier();
    run(step);
    memory_->barrier();
  }

  double gradient_norm() const override { return gradient_norm_; }
  JournalWriter& journal() override { return journal_; }

 private:
  // Squares of 2-norms over one chunk, written by the rank that owns the chunk.
  struct Norms {
    double gradient;
    double parameter;
    double direction;
  };
  enum class Pass { kReduceAndUpdate, kReduce, kDirect, kUpdate };

  FusedUpdate(SharedMemoryPtr memory, OptimizerState& state, int sharers)
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

  // Works on this rank's chunks of parameters that are updated in this step, on several threads. Leaves out those that have gone
  // through the pass's phase in this step, and reduces none for which nothing is left to do.
  void run_pass(const UpdateStep& step, Pass pass) {
    const bool directs = pass == Pass::kDirect || (pass == Pass::kReduce && step.rule.layerwise());
    const ChunkPhase phase = directs ? ChunkPhase::kDirected : ChunkPhase::kUpdated;
    step.gradients.parallel_for(first_, last_, kChunksPerTask, [&](size_t from, size_t to) {
      RedoSlot* const slot = journal_.slot_of_thread();
      for (size_t i = from; i < to; ++i) {
        if (!is_updated_[chunks_[i].parameter] || journal_.is_done(i, phase)) continue;
        if (state_dtype(parameter_of(i)) == torch::kFloat64)
          work_on<double>(step, pass, i, slot);
        else
          work_on<float>(step, pass, i, slot);
      }
    });
  }

  // Does the pass's work on one chunk, in the type T that the parameter is computed in. The mean gradient is the weighted sum over
  // all sources, the loss scale divided out.
  template <class T>
  void work_on(const UpdateStep& step, Pass pass, size_t i, RedoSlot* slot) {
    const Chunk& chunk = chunks_[i];
    alignas(kCacheLine) T in_cache[kMaxChunk];
    T* gradient = pass == Pass::kReduceAndUpdate ? in_cache : scratch<T>(i);
    if (T* const only = pass == Pass::kReduceAndUpdate ? only_gradient<T>(step, chunk) : nullptr) {
      gradient = only;
    } else if (pass == Pass::kReduceAndUpdate || pass == Pass::kReduce) {
      const auto& [weights, pointers, parallel_for] = step.gradients;
      const double scale = step.loss_scale.value_or(1);
      thread_local std::vector<Term> terms;
      terms.clear();
      for (size_t s = 0; s < weights.size(); ++s)
        terms.push_back({pointers[chunk.parameter * weights.size() + s], weights[s] / scale});
      weighted_sum<T>(terms, parameter_of(i).scalar_type(), chunk.begin, chunk.count, gradient);
    }
    if (pass == Pass::kReduce) {
      norms_[i].gradient = square_norm(gradient, chunk.count);
      return;
    }
    const bool is_direction = pass == Pass::kUpdate && step.rule.layerwise();
    const double factor = clip_factor(step.clipping, gradient_norm_);
    if (!is_direction && (factor != 1 || step.clipping.max_value > 0))
      scale_and_clamp(gradient, chunk.count, factor, step.clipping.max_value);
    if (pass == Pass::kDirect)
      direct(step, i, slot, gradient);
    else
      update(step, i, slot, gradient, is_direction ? trust_[chunk.parameter] : 1);
  }

  // The gradient where it lies, if there is one source and nothing changes its values: read together with parameter and state it
  // takes a quarter less time. Else null.
  template <class T>
  T* only_gradient(const UpdateStep& step, const Chunk& chunk) const {
    const auto& [weights, pointers, parallel_for] = step.gradients;
    const bool is_as_it_is = weights.size() == 1 && weights[0] == 1 && step.clipping.max_value <= 0;
    if (!is_as_it_is || state_.parameters[chunk.parameter].scalar_type() != c10::CppTypeToScalarType<T>::value)
      return nullptr;
    return static_cast<T*>(const_cast<void*>(pointers[chunk.parameter])) + chunk.begin;
  }

  // Turns the gradient of a chunk into the rule's direction.
  template <class T>
  void direct(const UpdateStep& step, size_t i, RedoSlot* slot, T* gradient) {
    const int64_t count = chunks_[i].count;
    const auto part = part_of(step.rule, ChunkPhase::kDirected, slot, {i, 0, count});
    const Elements<T> elements = elements_of(part, gradient, /*trust=*/1, journal_.begin_part(part));
    step.rule.direct(group_of(step, i), elements);
    norms_[i].parameter = square_norm(elements.parameter, count);
    norms_[i].direction = square_norm(gradient, count);
    journal_.end_part(part);
  }

  // Updates a chunk, part by part.
  template <class T>
  void update(const UpdateStep& step, size_t i, RedoSlot* slot, T* gradient, double trust) {
    const int64_t all = chunks_[i].count, most = journal_.part_elements();
    for (int64_t begin = journal_.first_element(i, ChunkPhase::kUpdated); begin < all; begin += most) {
      const auto part = part_of(step.rule, ChunkPhase::kUpdated, slot, {i, begin, std::min(most, all - begin)});
      const Targets to = journal_.begin_part(part);
      const Elements<T> elements = elements_of(part, gradient + begin, trust, to);
      step.rule.update(group_of(step, i), elements);
      store(elements, in<T>(part.targets, kAverage), to, parameter_of(i).scalar_type());
      journal_.end_part(part);
    }
  }

  // Stores the average and the 16-bit values that follow from the new values.
  template <class T>
  void store(const Elements<T>& elements, const T* average, const Targets& to, torch::ScalarType dtype) const {
    const T* const values = elements.new_parameter;
    if (average != nullptr && elements.step == 1)
      std::copy_n(values, elements.count, in<T>(to, kAverage));
    else if (average != nullptr)
      move_average(average, values, elements.count, state_.ema_decay, in<T>(to, kAverage));
    if (dtype == torch::kBFloat16) convert(values, elements.count, in<c10::BFloat16>(to, kStored));
    if (dtype == torch::kFloat16) convert(values, elements.count, in<c10::Half>(to, kStored));
  }

  // Returns the rule's input: it reads the targets and writes `to`.
  template <class T>
  Elements<T> elements_of(const JournalWriter::Part& part, T* gradient, double trust, const Targets& to) const {
    const size_t parameter = chunks_[part.elements.chunk].parameter;
    Elements<T> elements{.count = part.elements.count,
                         .parameter = in<T>(part.targets, kValues),
                         .gradient = gradient,
                         .step = state_.steps[parameter],
                         .trust = trust,
                         .new_parameter = in<T>(to, kValues)};
    for (size_t s = 0; s < kMaxStates; ++s) {
      elements.state[s] = in<T>(part.targets, s);
      elements.new_state[s] = in<T>(to, s);
    }
    const torch::ScalarType dtype = state_.parameters[parameter].scalar_type();
    if (dtype == torch::kBFloat16)
      follow_stored(in<c10::BFloat16>(part.targets, kStored), elements.count, elements.parameter);
    if (dtype == torch::kFloat16)
      follow_stored(in<c10::Half>(part.targets, kStored), elements.count, elements.parameter);
    return elements;
  }

  // The arrays are written in the phase in which the rule writes its state, everything else by the update.
  JournalWriter::Part part_of(const UpdateRule& rule, ChunkPhase phase, RedoSlot* slot,
                              const ChunkPart& elements) const {
    const Chunk& chunk = chunks_[elements.chunk];
    const bool all = elements.begin + elements.count == chunk.count;
    Targets targets;
    const auto set = [&](size_t which, const Tensors& list) {
      const int64_t size = to_int64(list[chunk.parameter].element_size());
      auto* const data = static_cast<std::byte*>(list[chunk.parameter].mutable_data_ptr());
      targets.all[which] = {data + (chunk.begin + elements.begin) * size, to_size(elements.count * size)};
    };
    for (size_t s = 0; s < state_.arrays.size(); ++s) set(s, state_.arrays[s]);
    if (!state_.averages.empty()) set(kAverage, state_.averages);
    const bool has_master = is_16_bit(parameter_of(elements.chunk));
    set(kValues, has_master ? state_.masters : state_.parameters);
    if (has_master) set(kStored, state_.parameters);
    if (rule.directs_with_state() != (phase == ChunkPhase::kDirected)) targets.first = kMaxStates;
    if (phase == ChunkPhase::kDirected) targets.last = kMaxStates;
    return {slot, elements, {journal_.step(), phase, all ? ChunkMark::kAll : elements.begin + elements.count}, targets};
  }

  const torch::Tensor& parameter_of(size_t chunk) const { return state_.parameters[chunks_[chunk].parameter]; }

  void find_updated(const WeightedGradients& gradients) {
    const size_t sources = gradients.weights.size();
    for (size_t i = 0; i < is_updated_.size(); ++i)
      is_updated_[i] = std::ranges::any_of(std::span(gradients.pointers).subspan(i * sources, sources),
                                           [](const void* gradient) { return gradient != nullptr; });
  }

  void count_steps() {
    for (size_t i = 0; i < is_updated_.size(); ++i) state_.steps[i] += is_updated_[i];
  }

  void find_norm() {
    double sum = 0;
    for (size_t i = 0; i < chunks_.size(); ++i)
      if (is_updated_[chunks_[i].parameter]) sum += norms_[i].gradient;
    gradient_norm_ = std::sqrt(sum);
  }

  void find_trust_ratios(const UpdateStep& step) {
    std::vector<double> parameter(is_updated_.size()), direction(is_updated_.size());
    for (size_t i = 0; i < chunks_.size(); ++i) {
      parameter[chunks_[i].parameter] += norms_[i].parameter;
      direction[chunks_[i].parameter] += norms_[i].direction;
    }
    trust_.resize(is_updated_.size());
    for (size_t i = 0; i < is_updated_.size(); ++i)
      trust_[i] =
          step.rule.trust_ratio(step.groups[state_.group_of[i]], std::sqrt(parameter[i]), std::sqrt(direction[i]));
  }

  // This rank's, unless others may have to go on from the directions in it.
  void make_scratch_memory() {
    if (scratch_ != nullptr) return;
    scratch_ = SharedMemory::alone()->allocate((last_ - first_) * chunk_bytes_).data;
    first_in_scratch_ = first_;
  }

  const UpdateRule::Group& group_of(const UpdateStep& step, size_t chunk) const {
    return step.groups[state_.group_of[chunks_[chunk].parameter]];
  }

  template <class T>
  T* scratch(size_t chunk) {
    return reinterpret_cast<T*>(scratch_.get() + (chunk - first_in_scratch_) * chunk_bytes_);
  }

  SharedMemoryPtr memory_;
  OptimizerState& state_;
  std::vector<Chunk> chunks_;
  size_t chunk_bytes_ = 0;  // of a gradient in scratch_
  size_t first_;            // this rank owns chunks [first_, last_)
  size_t last_;
  std::vector<char> is_updated_;        // in this step, each parameter: some source has a gradient for it
  std::shared_ptr<Norms[]> norms_;      // of each chunk; shared
  std::shared_ptr<std::byte> scratch_;  // gradients of chunks from first_in_scratch_ on, between two passes
  size_t first_in_scratch_ = 0;
  std::vector<double> trust_;  // of each parameter
  double gradient_norm_ = 0;
  JournalWriter journal_;
};

}  // namespace

std::unique_ptr<FlatUpdate> FlatUpdate::make(SharedMemoryPtr memory, OptimizerState& state,
                                             const JournalOptions& journal) {
  return std::make_unique<FusedUpdate>(std::move(memory), state, journal);
}

uint64_t FlatUpdate::finish(SharedMemoryPtr memory, InterruptedUpdate& lost) {
  const std::optional<StepRecord> record = UpdateJournal(lost.journal, lost.shape).newest();
  if (!record) return 0;
  lost.state.steps = record->steps;
  if (record->skipped) return record->step;
  WeightedGradients gradients{.weights = record->weights};
  gradients.parallel_for = [](auto begin, auto end, auto, const auto& part) {
    part(begin, end);
  };  // one slot is certain
  for (size_t i = 0; const uint64_t word : record->gradients) {
    const size_t bytes = lost.state.parameters[i++ / record->weights.size()].nbytes();
    gradients.pointers.push_back(word == kNoPlace ? nullptr : lost.find(place_of_word(word), bytes));
  }
  std::vector<UpdateRule::Group> groups;
  for (const OptimizerOptions& options : record->options)
    groups.push_back(std::visit([](const auto& values) { return parameter_group({}, values); }, options));
  const auto rule = rule_of(record->options.front());
  UpdateStep step{*rule, groups, gradients, record->clipping};
  if (!std::isnan(record->loss_scale)) step.loss_scale = record->loss_scale;
  FusedUpdate(std::move(memory), lost, record->step).finish(step);
  return record->step;
}

}  // namespace lockstep
