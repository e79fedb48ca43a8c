// SPDX-License-Identifier: Apache-2.0
#include "lockstep/optimizer/flat_update.h"

#include <algorithm>
#include <cmath>

#include "lockstep/base/cache_line.h"
#include "lockstep/base/defects.h"
#include "lockstep/optimizer/mean.h"

namespace lockstep {
namespace {

constexpr std::int64_t kPiecesPerTask = 8;  // of a thread

// Squares of 2-norms over one chunk, written by the rank that owns the chunk.
struct Norms {
  double gradient;
  double parameter;
  double direction;
};

// Elements [begin, begin + count) of a parameter.
struct Chunk {
  std::size_t parameter;
  std::int64_t begin;
  std::int64_t count;
};

// Every rank cuts the same parameters into the same chunks.
std::vector<Chunk> cut_into_chunks(const std::vector<torch::Tensor>& parameters) {
  std::vector<Chunk> chunks;
  for (std::size_t i = 0; i < parameters.size(); ++i)
    for (std::int64_t begin = 0; begin < parameters[i].numel(); begin += kMaxRun)
      chunks.push_back({i, begin, std::min(kMaxRun, parameters[i].numel() - begin)});
  return chunks;
}

// The first chunk that `rank` owns; it owns all from there to first_chunk_of(rank + 1). Every rank has 1/ranks of the
// elements, up to a chunk.
std::size_t first_chunk_of(int rank, int ranks, const std::vector<Chunk>& chunks) {
  std::int64_t all = 0, before = 0;
  for (const Chunk& chunk : chunks) all += chunk.count;
  std::size_t i = 0;
  for (; i < chunks.size() && before * ranks < all * rank; ++i) before += chunks[i].count;
  return i;
}

// The dtype of a parameter's update and state: float64 for float64, float32 for all others.
torch::ScalarType computed_in(const torch::Tensor& parameter) {
  return parameter.scalar_type() == torch::kFloat64 ? torch::kFloat64 : torch::kFloat32;
}

// A zeroed array beside each parameter that is `wanted`. All lie in one allocation, which the ranks share.
std::vector<torch::Tensor> arrays_beside(const std::vector<torch::Tensor>& parameters, SharedMemory& memory,
                                         bool (*wanted)(const torch::Tensor&)) {
  std::size_t bytes = 0;
  std::vector<std::size_t> offsets;
  for (const torch::Tensor& parameter : parameters) {
    offsets.push_back(bytes);
    if (wanted(parameter)) bytes += round_up(parameter.numel() * c10::elementSize(computed_in(parameter)), kCacheLine);
  }
  const std::shared_ptr<std::byte> data = memory.allocate_common(bytes);
  std::vector<torch::Tensor> arrays(parameters.size());
  for (std::size_t i = 0; i < parameters.size(); ++i)
    if (wanted(parameters[i]))
      arrays[i] = torch::from_blob(
          data.get() + offsets[i], parameters[i].sizes(), parameters[i].strides(), [data](void*) {},
          torch::TensorOptions().dtype(computed_in(parameters[i])));
  return arrays;
}

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
void move_average(T* __restrict average, const T* __restrict values, std::int64_t count, double decay) {
  const T rest = static_cast<T>(1 - decay);
  for (std::int64_t i = 0; i < count; ++i) average[i] += rest * (values[i] - average[i]);
}

template <class To, class From>
void convert(const From* __restrict from, std::int64_t count, To* __restrict to) {
  for (std::int64_t i = 0; i < count; ++i) to[i] = static_cast<To>(from[i]);
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
class FlatUpdate::Impl {
 public:
  Impl(std::shared_ptr<SharedMemory> memory, OptimizerState& state)
      : memory_(std::move(memory)),
        state_(state),
        chunks_(cut_into_chunks(state.parameters)),
        first_(first_chunk_of(memory_->rank(), memory_->size(), chunks_)),
        last_(first_chunk_of(memory_->rank() + 1, memory_->size(), chunks_)),
        is_updated_(state.parameters.size()) {
    const auto every = [](const torch::Tensor&) { return true; };
    for (auto& array : state.arrays) array = arrays_beside(state.parameters, *memory_, every);
    if (state.ema_decay > 0) state.averages = arrays_beside(state.parameters, *memory_, every);
    if (std::any_of(state.parameters.begin(), state.parameters.end(), is_16_bit))
      state.masters = arrays_beside(state.parameters, *memory_, is_16_bit);
  }

  bool run(const UpdateStep& step) {
    ++number_;
    find_updated(step.gradients);
    if (!step.loss_scale && step.clipping.max_norm <= 0 && !step.rule.layerwise()) {
      count_steps();
      update_in_one_pass(step);
      return true;
    }
    reduce(step);
    if (step.loss_scale && !std::isfinite(gradient_norm_) && !defect("an overflow is not seen")) return false;
    count_steps();
    if (step.rule.layerwise()) find_directions(step);
    update_from_scratch_memory(step);
    return true;
  }

  double gradient_norm() const { return gradient_norm_; }

 private:
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

  // Calls each(number, chunk, T()) for this rank's chunks of parameters that are updated in this step, on several
  // threads. T is the type that the parameter is computed in.
  template <class Each>
  void for_own_chunks(const UpdateStep& step, const Each& each) {
    const auto part = [&](std::size_t from, std::size_t to) {
      for (std::size_t i = from; i < to; ++i) {
        const Chunk& chunk = chunks_[i];
        if (!is_updated_[chunk.parameter]) continue;
        if (computed_in(parameter_of(chunk)) == torch::kFloat64)
          each(i, chunk, double());
        else
          each(i, chunk, float());
      }
    };
    step.gradients.parallel_for(first_, last_, kPiecesPerTask, part);
  }

  void update_in_one_pass(const UpdateStep& step) {
    for_own_chunks(step, [&](std::size_t, const Chunk& chunk, auto type) {
      using T = decltype(type);
      alignas(kCacheLine) T gradient[kMaxRun];
      sum_gradients(step, chunk, gradient);
      if (step.clipping.max_value > 0) scale_and_clamp(gradient, chunk.count, 1, step.clipping.max_value);
      update(step, chunk, gradient, /*trust=*/1);
    });
  }

  void reduce(const UpdateStep& step) {
    make_room_for_norms();
    for_own_chunks(step, [&](std::size_t number, const Chunk& chunk, auto type) {
      using T = decltype(type);
      T* const gradient = scratch<T>(number);
      sum_gradients(step, chunk, gradient);
      norms_[number].gradient = square_norm(gradient, chunk.count);
    });
    memory_->barrier(signature_of(StepPhase::kNorms, number_));
    double sum = 0;
    const bool slice = defect("a norm of one slice");
    for (std::size_t i = slice ? first_ : 0; i < (slice ? last_ : chunks_.size()); ++i)
      if (is_updated_[chunks_[i].parameter]) sum += norms_[i].gradient;
    gradient_norm_ = std::sqrt(sum);
  }

  // As torch::nn::utils::clip_grad_norm_.
  double clip_factor(const ClippingOptions& clipping) const {
    return clipping.max_norm > 0 ? std::min(1.0, clipping.max_norm / (gradient_norm_ + 1e-6)) : 1;
  }

  void find_directions(const UpdateStep& step) {
    const double factor = defect("layerwise rules are not clipped") ? 1 : clip_factor(step.clipping);
    for_own_chunks(step, [&](std::size_t number, const Chunk& chunk, auto type) {
      using T = decltype(type);
      T* const gradient = scratch<T>(number);
      scale_and_clamp(gradient, chunk.count, factor, step.clipping.max_value);
      const Run<T> run = run_of(chunk, gradient, /*trust=*/1);
      step.rule.direct(group_of(step, chunk), run);
      norms_[number].parameter = square_norm(run.parameter, chunk.count);
      norms_[number].direction = square_norm(gradient, chunk.count);
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
    for_own_chunks(step, [&](std::size_t number, const Chunk& chunk, auto type) {
      using T = decltype(type);
      T* const gradient = scratch<T>(number);
      if (!step.rule.layerwise()) scale_and_clamp(gradient, chunk.count, factor, step.clipping.max_value);
      const bool trusts = step.rule.layerwise() && !defect("the trust ratio is dropped");
      update(step, chunk, gradient, trusts ? trust_[chunk.parameter] : 1);
    });
  }

  // mean[i]: the weighted sum over all sources, the loss scale divided out.
  template <class T>
  void sum_gradients(const UpdateStep& step, const Chunk& chunk, T* mean) const {
    const auto& [weights, pointers, parallel_for] = step.gradients;
    const double scale = defect("the loss scale is dropped") ? 1 : step.loss_scale.value_or(1);
    thread_local std::vector<Term> terms;
    terms.clear();
    for (std::size_t s = 0; s < weights.size(); ++s)
      terms.push_back({pointers[chunk.parameter * weights.size() + s], weights[s] / scale});
    weighted_sum<T>(terms, parameter_of(chunk).scalar_type(), chunk.begin, chunk.count, mean);
  }

  template <class T>
  void update(const UpdateStep& step, const Chunk& chunk, T* gradient, double trust) {
    const Run<T> run = run_of(chunk, gradient, trust);
    step.rule.update(group_of(step, chunk), run);
    if (!state_.averages.empty()) update_average(chunk, run);
    with_16_bits(chunk, [&](auto* stored) { convert(run.parameter, chunk.count, stored); });
  }

  const UpdateRule::Group& group_of(const UpdateStep& step, const Chunk& chunk) const {
    return step.groups[state_.group_of[chunk.parameter]];
  }

  template <class T>
  Run<T> run_of(const Chunk& chunk, T* gradient, double trust) {
    Run<T> run{.count = chunk.count,
               .parameter = values<T>(chunk),
               .gradient = gradient,
               .step = state_.steps[chunk.parameter],
               .trust = trust};
    for (std::size_t s = 0; s < state_.arrays.size(); ++s) run.state[s] = part_of<T>(state_.arrays[s], chunk);
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
  void update_average(const Chunk& chunk, const Run<T>& run) {
    T* const average = part_of<T>(state_.averages, chunk);
    if (run.step == 1)
      std::copy_n(run.parameter, chunk.count, average);
    else
      move_average(average, run.parameter, chunk.count, state_.ema_decay);
  }

  const torch::Tensor& parameter_of(const Chunk& chunk) const { return state_.parameters[chunk.parameter]; }

  template <class T>
  static T* part_of(const std::vector<torch::Tensor>& arrays, const Chunk& chunk) {
    return static_cast<T*>(arrays[chunk.parameter].mutable_data_ptr()) + chunk.begin;
  }

  // Where the gradient of an own chunk is kept between two passes: private memory, 8 bytes for each element.
  template <class T>
  T* scratch(std::size_t chunk) {
    return reinterpret_cast<T*>(scratch_.data() + (chunk - first_) * kMaxRun * sizeof(double));
  }

  // Collective, in the first step that needs norms.
  void make_room_for_norms() {
    if (norms_ != nullptr) return;
    norms_ = std::reinterpret_pointer_cast<Norms[]>(
        memory_->allocate_common(std::max<std::size_t>(chunks_.size(), 1) * sizeof(Norms)));
    scratch_.resize((last_ - first_) * kMaxRun * sizeof(double));
  }

  std::shared_ptr<SharedMemory> memory_;
  OptimizerState& state_;
  std::vector<Chunk> chunks_;
  std::size_t first_;  // this rank owns chunks [first_, last_)
  std::size_t last_;
  std::vector<char> is_updated_;    // in this step, each parameter: some source has a gradient for it
  std::shared_ptr<Norms[]> norms_;  // of each chunk; shared
  std::vector<std::byte> scratch_;
  std::vector<double> trust_;  // of each parameter
  double gradient_norm_ = 0;
  std::uint64_t number_ = 0;  // of the step
};

FlatUpdate::FlatUpdate(std::shared_ptr<SharedMemory> memory, OptimizerState& state)
    : impl_(std::make_unique<Impl>(std::move(memory), state)) {}
FlatUpdate::~FlatUpdate() = default;
bool FlatUpdate::run(const UpdateStep& step) { return impl_->run(step); }
double FlatUpdate::gradient_norm() const { return impl_->gradient_norm(); }

}  // namespace lockstep
