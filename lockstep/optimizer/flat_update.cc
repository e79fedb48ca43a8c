// SPDX-License-Identifier: Apache-2.0
#include "lockstep/optimizer/flat_update.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <span>

#include "lockstep/base/cache_line.h"
#include "lockstep/optimizer/chunks.h"
#include "lockstep/optimizer/mean.h"
#include "lockstep/optimizer/rule.h"
#include "lockstep/optimizer/run_writer.h"
#include "lockstep/optimizer/update_journal.h"

namespace lockstep {
namespace {

constexpr std::int64_t kChunksPerTask = 8;  // of a thread

// Squares of 2-norms over one chunk, written by the rank that owns the chunk.
struct Norms {
  double gradient;
  double parameter;
  double direction;
};

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

// A rank that finishes what others left has one redo slot for certain.
void on_calling_thread(std::int64_t begin, std::int64_t end, std::int64_t,
                       const std::function<void(std::int64_t, std::int64_t)>& part) {
  part(begin, end);
}

UpdateRule::Group group_with(const OptimizerOptions& options) {
  return std::visit([](const auto& values) { return parameter_group({}, values); }, options);
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
//   reduce()            own chunks: the mean gradient into scratch memory, the square of its norm into norms_
//                       barrier: all norms are written
//                       every rank adds up the norms of all chunks in their order, and so decides the same
//   find_directions()   layerwise rules: own chunks: the direction into scratch memory, norms into norms_
//                       barrier, then every rank computes the same trust ratio of each parameter
//   update_from_scratch_memory()  own chunks: apply the rule
// norms_ needs no third barrier: the two phases write different fields, and the next step writes only after
// GradientSource::end_update(), which every rank calls when it has read them.
//
// Where other processes may have to finish the step (update_journal.h), they run the same passes, over the same memory, and
// leave out what is marked as done.
class FlatUpdate::Impl {
  using Own = RunWriter::Own;

 public:
  Impl(std::shared_ptr<SharedMemory> memory, OptimizerState& state, const UpdateOptions& options)
      : Impl(std::move(memory), state, /*ranks=*/0) {
    const auto every = [](const torch::Tensor&) { return true; };
    for (auto& array : state.arrays) array = arrays_beside(state.parameters, *memory_, every);
    if (state.ema_decay > 0) state.averages = arrays_beside(state.parameters, *memory_, every);
    if (std::any_of(state.parameters.begin(), state.parameters.end(), is_16_bit))
      state.masters = arrays_beside(state.parameters, *memory_, is_16_bit);
    if (options.kept_sources > 0) keep(options);
  }

  // Over what other ranks have left.
  Impl(std::shared_ptr<SharedMemory> memory, KeptUpdate& kept)
      : Impl(std::move(memory), kept.state, static_cast<int>(kept.shape.ranks)) {
    norms_ = {std::shared_ptr<std::byte>(), reinterpret_cast<Norms*>(kept.norms)};
    if (kept.directions != nullptr) scratch_ = {std::shared_ptr<std::byte>(), kept.directions};
    writer_.keep(kept, std::min(memory_->rank(), static_cast<int>(kept.shape.ranks) - 1));
  }

  bool run(const UpdateStep& step) {
    ++number_;
    find_updated(step.gradients);
    writer_.begin_step(number_, step, is_updated_, *memory_);
    const bool updated = complete(step);
    if (!updated) writer_.skip_step();
    return updated;
  }

  void note_state() { writer_.note_state(number_); }

  std::string manifest() const {
    const auto chunks = [this](const void* data, std::size_t each) {
      return std::span(static_cast<const std::byte*>(data), data == nullptr ? 0 : chunks_.size() * each);
    };
    return writer_.manifest({.norms = chunks(norms_.get(), sizeof(Norms)),
                             .directions = chunks(keeps_directions_ ? scratch_.get() : nullptr, chunk_bytes_)},
                            *memory_);
  }

  void finish(const StepRecord& record, const UpdateStep& step) {
    number_ = record.step;
    writer_.resume_step(number_);
    writer_.put_what_is_ready(step.rule, chunks_, first_, last_);
    memory_->barrier();
    find_updated(step.gradients);
    complete(step);
    memory_->barrier();
  }

  double gradient_norm() const { return gradient_norm_; }

 private:
  // ranks: that may share the work; 0: all of them.
  Impl(std::shared_ptr<SharedMemory> memory, OptimizerState& state, int ranks)
      : memory_(std::move(memory)),
        state_(state),
        chunks_(cut_into_chunks(state.parameters)),
        chunk_bytes_(gradient_bytes_of_chunk(state.parameters)),
        is_updated_(state.parameters.size()),
        writer_(state) {
    const int sharers = ranks == 0 ? memory_->size() : std::min(ranks, memory_->size());
    first_ = first_chunk_of(memory_->rank(), sharers, chunks_);
    last_ = first_chunk_of(memory_->rank() + 1, sharers, chunks_);
  }

  // Collective, as are all calls that allocate.
  void keep(const UpdateOptions& options) {
    make_room_for_norms();
    if (options.layerwise) {
      scratch_ = memory_->allocate_common(chunks_.size() * chunk_bytes_);
      first_in_scratch_ = 0;
      keeps_directions_ = true;
    }
    writer_.keep(memory_, options, chunks_.size());
  }

  bool complete(const UpdateStep& step) {
    if (!step.loss_scale && step.clipping.max_norm <= 0 && !step.rule.layerwise()) {
      count_steps();
      update_in_one_pass(step);
      return true;
    }
    reduce(step);
    if (step.loss_scale && !std::isfinite(gradient_norm_)) return false;
    count_steps();
    if (step.rule.layerwise()) find_directions(step);
    update_from_scratch_memory(step);
    return true;
  }

  void find_updated(const WeightedGradients& gradients) {
    const auto sources = static_cast<std::ptrdiff_t>(gradients.weights.size());
    auto pointer = gradients.pointers.begin();
    for (char& is_updated : is_updated_) {
      is_updated = std::any_of(pointer, pointer + sources, [](const void* gradient) { return gradient != nullptr; });
      pointer += sources;
    }
  }

  void count_steps() {
    for (std::size_t i = 0; i < is_updated_.size(); ++i) state_.steps[i] += is_updated_[i] ? 1 : 0;
  }

  // Calls each(own, chunk, T()) for this rank's chunks of parameters that are updated in this step and that have not gone
  // through `phase` in it yet, on several threads. T is the type that the parameter is computed in.
  template <class Each>
  void for_own_chunks(const UpdateStep& step, ChunkPhase phase, const Each& each) {
    writer_.begin_pass();
    const auto part = [&](std::size_t from, std::size_t to) {
      RedoSlot* const redo = writer_.begin_chunks();
      for (std::size_t i = from; i < to; ++i) {
        const Chunk& chunk = chunks_[i];
        if (!is_updated_[chunk.parameter] || writer_.is_done(i, phase)) continue;
        if (computed_in(parameter_of(chunk)) == torch::kFloat64)
          each(Own{i, redo}, chunk, double());
        else
          each(Own{i, redo}, chunk, float());
      }
    };
    step.gradients.parallel_for(first_, last_, kChunksPerTask, part);
  }

  void update_in_one_pass(const UpdateStep& step) {
    for_own_chunks(step, ChunkPhase::kUpdated, [&](const Own& own, const Chunk& chunk, auto type) {
      using T = decltype(type);
      alignas(kCacheLine) T gradient[kMaxRun];
      sum_gradients(step, chunk, gradient);
      if (step.clipping.max_value > 0) scale_and_clamp(gradient, chunk.count, 1, step.clipping.max_value);
      update(step, own, chunk, gradient, /*trust=*/1);
    });
  }

  void reduce(const UpdateStep& step) {
    make_room_for_norms();
    make_scratch_memory();
    const ChunkPhase next = step.rule.layerwise() ? ChunkPhase::kDirected : ChunkPhase::kUpdated;
    for_own_chunks(step, next, [&](const Own& own, const Chunk& chunk, auto type) {
      using T = decltype(type);
      T* const gradient = scratch<T>(own.number);
      sum_gradients(step, chunk, gradient);
      norms_[own.number].gradient = square_norm(gradient, chunk.count);
    });
    memory_->barrier(signature_of(StepPhase::kNorms, number_));
    double sum = 0;
    for (std::size_t i = 0; i < chunks_.size(); ++i)
      if (is_updated_[chunks_[i].parameter]) sum += norms_[i].gradient;
    gradient_norm_ = std::sqrt(sum);
  }

  // As torch::nn::utils::clip_grad_norm_.
  double clip_factor(const ClippingOptions& clipping) const {
    return clipping.max_norm > 0 ? std::min(1.0, clipping.max_norm / (gradient_norm_ + 1e-6)) : 1;
  }

  void find_directions(const UpdateStep& step) {
    const double factor = clip_factor(step.clipping);
    for_own_chunks(step, ChunkPhase::kDirected, [&](const Own& own, const Chunk& chunk, auto type) {
      using T = decltype(type);
      T* const gradient = scratch<T>(own.number);
      scale_and_clamp(gradient, chunk.count, factor, step.clipping.max_value);
      const auto direct = [&](const Chunk& whole, const RedoSlot::Parts& parts) {
        Run<T> run = run_of(whole, gradient, /*trust=*/1);
        for (std::size_t s = 0; s < parts.count; ++s) run.new_state[s] = part<T>(parts, s);
        step.rule.direct(group_of(step, whole), run);
        norms_[own.number].parameter = square_norm(run.parameter, whole.count);
        norms_[own.number].direction = square_norm(gradient, whole.count);
      };
      writer_.write(step.rule, own, chunk, ChunkPhase::kDirected, kMaxRun, direct);
    });
    memory_->barrier(signature_of(StepPhase::kTrustRatios, number_));
    find_trust_ratios(step);
  }

  void find_trust_ratios(const UpdateStep& step) {
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

  void update_from_scratch_memory(const UpdateStep& step) {
    const double factor = clip_factor(step.clipping);
    for_own_chunks(step, ChunkPhase::kUpdated, [&](const Own& own, const Chunk& chunk, auto type) {
      using T = decltype(type);
      T* const gradient = scratch<T>(own.number);
      if (!step.rule.layerwise()) scale_and_clamp(gradient, chunk.count, factor, step.clipping.max_value);
      update(step, own, chunk, gradient, step.rule.layerwise() ? trust_[chunk.parameter] : 1);
    });
  }

  // mean[i]: the weighted sum over all sources, the loss scale divided out.
  template <class T>
  void sum_gradients(const UpdateStep& step, const Chunk& chunk, T* mean) const {
    const auto& [weights, pointers, parallel_for] = step.gradients;
    const double scale = step.loss_scale.value_or(1);
    thread_local std::vector<Term> terms;
    terms.clear();
    for (std::size_t s = 0; s < weights.size(); ++s)
      terms.push_back({pointers[chunk.parameter * weights.size() + s], weights[s] / scale});
    weighted_sum<T>(terms, parameter_of(chunk).scalar_type(), chunk.begin, chunk.count, mean);
  }

  template <class T>
  void update(const UpdateStep& step, const Own& own, const Chunk& chunk, T* gradient, double trust) {
    const auto update = [&](const Chunk& range, const RedoSlot::Parts& parts) {
      Run<T> run = run_of(range, gradient + (range.begin - chunk.begin), trust);
      std::size_t next = 0;
      if (!step.rule.directs_with_state())
        for (; next < state_.arrays.size(); ++next) run.new_state[next] = part<T>(parts, next);
      T* const new_average = state_.averages.empty() ? nullptr : part<T>(parts, next++);
      run.new_parameter = part<T>(parts, next++);
      step.rule.update(group_of(step, range), run);
      if (new_average != nullptr) update_average(range, run, new_average);
      with_16_bits(range, [&](auto* stored) {
        convert(run.new_parameter, range.count, part<std::remove_pointer_t<decltype(stored)>>(parts, next));
      });
    };
    writer_.write(step.rule, own, chunk, ChunkPhase::kUpdated, RunWriter::kKeptRun, update);
  }

  const UpdateRule::Group& group_of(const UpdateStep& step, const Chunk& chunk) const {
    return step.groups[state_.group_of[chunk.parameter]];
  }

  template <class T>
  Run<T> run_of(const Chunk& range, T* gradient, double trust) {
    Run<T> run{.count = range.count,
               .parameter = values<T>(range),
               .gradient = gradient,
               .step = state_.steps[range.parameter],
               .trust = trust};
    for (std::size_t s = 0; s < state_.arrays.size(); ++s) run.state[s] = part_of<T>(state_.arrays[s], range);
    run.new_state = run.state;
    return run;
  }

  // What the rule updates: the parameter itself, or the float32 master of a 16-bit one. Where the parameter is not the
  // rounded master, it was written since the last step: from a checkpoint, or before the first one.
  template <class T>
  T* values(const Chunk& chunk) {
    if (!is_16_bit(parameter_of(chunk))) return part_of<T>(state_.parameters, chunk);
    T* const master = part_of<T>(state_.masters, chunk);
    with_16_bits(chunk, [&](const auto* stored) {
      for (std::int64_t i = 0; i < chunk.count; ++i)
        if (static_cast<std::remove_cvref_t<decltype(*stored)>>(master[i]) != stored[i]) master[i] = stored[i];
    });
    return master;
  }

  // Calls each() with the values of a 16-bit parameter, as they are stored.
  void with_16_bits(const Chunk& chunk, const auto& each) const {
    const torch::ScalarType dtype = parameter_of(chunk).scalar_type();
    if (dtype == torch::kBFloat16) each(part_of<c10::BFloat16>(state_.parameters, chunk));
    if (dtype == torch::kFloat16) each(part_of<c10::Half>(state_.parameters, chunk));
  }

  template <class T>
  void update_average(const Chunk& range, const Run<T>& run, T* new_average) {
    if (run.step == 1)
      std::copy_n(run.new_parameter, range.count, new_average);
    else
      move_average(part_of<T>(state_.averages, range), run.new_parameter, range.count, state_.ema_decay, new_average);
  }

  const torch::Tensor& parameter_of(const Chunk& chunk) const { return state_.parameters[chunk.parameter]; }

  template <class T>
  static T* part(const RedoSlot::Parts& parts, std::size_t which) {
    return reinterpret_cast<T*>(parts.all[which].data());
  }

  // Where the gradient of an own chunk is kept between two passes.
  template <class T>
  T* scratch(std::size_t chunk) {
    return reinterpret_cast<T*>(scratch_.get() + (chunk - first_in_scratch_) * chunk_bytes_);
  }

  // Collective, in the first step that needs norms.
  void make_room_for_norms() {
    if (norms_ != nullptr) return;
    norms_ = std::reinterpret_pointer_cast<Norms[]>(
        memory_->allocate_common(std::max<std::size_t>(chunks_.size(), 1) * sizeof(Norms)));
  }

  // Of this rank, unless others may have to go on from the directions that are there between two passes.
  void make_scratch_memory() {
    if (scratch_ != nullptr) return;
    scratch_ = SharedMemory::alone()->allocate((last_ - first_) * chunk_bytes_).data;
    first_in_scratch_ = first_;
  }

  std::shared_ptr<SharedMemory> memory_;
  OptimizerState& state_;
  std::vector<Chunk> chunks_;
  std::size_t chunk_bytes_;  // of a gradient in scratch_
  std::size_t first_;        // this rank owns chunks [first_, last_)
  std::size_t last_;
  std::vector<char> is_updated_;        // in this step, each parameter: some source has a gradient for it
  std::shared_ptr<Norms[]> norms_;      // of each chunk; shared
  std::shared_ptr<std::byte> scratch_;  // of chunks from first_in_scratch_ on
  std::size_t first_in_scratch_ = 0;
  bool keeps_directions_ = false;  // scratch_ is shared, and has all chunks
  std::vector<double> trust_;      // of each parameter
  double gradient_norm_ = 0;
  std::uint64_t number_ = 0;  // of the step
  RunWriter writer_;
};

FlatUpdate::FlatUpdate(std::shared_ptr<SharedMemory> memory, OptimizerState& state, const UpdateOptions& options)
    : impl_(std::make_unique<Impl>(std::move(memory), state, options)) {}
FlatUpdate::~FlatUpdate() = default;
bool FlatUpdate::run(const UpdateStep& step) { return impl_->run(step); }
double FlatUpdate::gradient_norm() const { return impl_->gradient_norm(); }
void FlatUpdate::note_state() { impl_->note_state(); }
std::string FlatUpdate::manifest() const { return impl_->manifest(); }

std::uint64_t FlatUpdate::finish(std::shared_ptr<SharedMemory> memory, KeptUpdate& kept) {
  const std::optional<StepRecord> record = UpdateJournal(kept.journal, kept.shape).newest();
  if (!record) return 0;
  kept.state.steps = record->steps;
  if (record->skipped) return record->step;
  WeightedGradients gradients{.weights = record->weights, .parallel_for = on_calling_thread};
  for (std::size_t i = 0; i < record->gradients.size(); ++i) {
    const auto& place = record->gradients[i];
    const std::size_t bytes = kept.state.parameters[i / record->weights.size()].nbytes();
    gradients.pointers.push_back(place ? kept.find(*place, bytes) : nullptr);
  }
  std::vector<UpdateRule::Group> groups;
  for (const OptimizerOptions& options : record->options) groups.push_back(group_with(options));
  const auto rule = rule_of(record->options.front());
  Impl(std::move(memory), kept).finish(*record, {*rule, groups, gradients, record->clipping, record->loss_scale});
  return record->step;
}

}  // namespace lockstep
