// SPDX-License-Identifier: Apache-2.0
#include "lockstep/optimizer/flat_update.h"

#include <algorithm>
#include <cmath>

#include "lockstep/base/cache_line.h"
#include "lockstep/optimizer/chunks.h"
#include "lockstep/optimizer/mean.h"
#include "lockstep/optimizer/side_array.h"

namespace lockstep {
namespace {

constexpr std::int64_t kPiecesPerTask = 8;  // of a thread

// Squares of 2-norms over one chunk, written by the rank that owns the chunk.
struct Norms {
  double gradient;
  double parameter;
  double direction;
};

std::vector<std::int64_t> sizes_of(const std::vector<torch::Tensor>& parameters) {
  std::vector<std::int64_t> sizes;
  for (const torch::Tensor& parameter : parameters) sizes.push_back(parameter.numel());
  return sizes;
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
  Impl(std::shared_ptr<SharedMemory> memory, std::vector<torch::Tensor> parameters, Options options)
      : memory_(std::move(memory)),
        parameters_(std::move(parameters)),
        options_(std::move(options)),
        chunks_(cut_into_chunks(sizes_of(parameters_))),
        first_(first_chunk_of(memory_->rank(), memory_->size(), chunks_)),
        last_(first_chunk_of(memory_->rank() + 1, memory_->size(), chunks_)),
        steps_(parameters_.size()),
        data_(parameters_.size()) {
    const auto every = [](const torch::Tensor&) { return true; };
    for (std::size_t i = 0; i < options_.states; ++i) states_.emplace_back(*memory_, parameters_, every);
    if (options_.ema_decay > 0) average_ = SideArray(*memory_, parameters_, every);
    if (std::any_of(parameters_.begin(), parameters_.end(), is_16_bit))
      masters_ = SideArray(*memory_, parameters_, is_16_bit);
  }

  bool run(const UpdateRule& rule, const std::vector<UpdateRule::Group>& groups, const WeightedGradients& gradients,
           const GradientTreatment& treatment) {
    const Step step{rule, groups, gradients, treatment};
    ++number_;
    begin(step);
    if (!treatment.skip_if_not_finite && treatment.max_norm <= 0 && !rule.layerwise()) {
      count_steps();
      update_in_one_pass(step);
      return true;
    }
    reduce(step);
    if (treatment.skip_if_not_finite && !std::isfinite(gradient_norm_)) return false;
    count_steps();
    if (rule.layerwise()) find_directions(step);
    update_from_scratch_memory(step);
    return true;
  }

  torch::Tensor state(std::size_t i, std::size_t number) const { return states_[number].view(i, parameters_[i]); }
  torch::Tensor average(std::size_t i) const { return average_ ? average_.view(i, parameters_[i]) : torch::Tensor(); }
  torch::Tensor master(std::size_t i) const {
    return is_16_bit(parameters_[i]) ? masters_.view(i, parameters_[i]) : torch::Tensor();
  }
  std::int64_t& steps(std::size_t i) { return steps_[i]; }
  double gradient_norm() const { return gradient_norm_; }

 private:
  struct Step {
    const UpdateRule& rule;
    const std::vector<UpdateRule::Group>& groups;
    const WeightedGradients& gradients;
    const GradientTreatment& treatment;
  };

  void begin(const Step& step) {
    const std::size_t sources = step.gradients.weights.size();
    is_updated_.assign(parameters_.size(), false);
    for (std::size_t i = 0; i < parameters_.size(); ++i) {
      data_[i] = static_cast<std::byte*>(parameters_[i].mutable_data_ptr());
      for (std::size_t s = 0; s < sources; ++s)
        is_updated_[i] = is_updated_[i] || step.gradients.pointers[i * sources + s] != nullptr;
    }
  }

  void count_steps() {
    for (std::size_t i = 0; i < parameters_.size(); ++i) steps_[i] += is_updated_[i] ? 1 : 0;
  }

  // Calls each(number, chunk, T()) for this rank's chunks of parameters that are updated in this step, on several
  // threads. T is the type that the parameter is computed in.
  template <class Each>
  void for_own_chunks(const Step& step, const Each& each) {
    const auto part = [&](std::size_t from, std::size_t to) {
      for (std::size_t i = from; i < to; ++i) {
        const Chunk& chunk = chunks_[i];
        if (!is_updated_[chunk.parameter]) continue;
        if (computed_in(parameters_[chunk.parameter]) == torch::kFloat64)
          each(i, chunk, double());
        else
          each(i, chunk, float());
      }
    };
    step.gradients.parallel_for(first_, last_, kPiecesPerTask, part);
  }

  void update_in_one_pass(const Step& step) {
    for_own_chunks(step, [&](std::size_t, const Chunk& chunk, auto type) {
      using T = decltype(type);
      alignas(kCacheLine) T gradient[kMaxRun];
      sum_gradients(step, chunk, gradient);
      if (step.treatment.max_value > 0) scale_and_clamp(gradient, chunk.count, 1, step.treatment.max_value);
      update(step, chunk, gradient, /*trust=*/1);
    });
  }

  void reduce(const Step& step) {
    make_room_for_norms();
    for_own_chunks(step, [&](std::size_t number, const Chunk& chunk, auto type) {
      using T = decltype(type);
      T* const gradient = scratch<T>(number);
      sum_gradients(step, chunk, gradient);
      norms()[number].gradient = square_norm(gradient, chunk.count);
    });
    memory_->barrier(signature_of(StepPhase::kNorms, number_));
    double sum = 0;
    for (std::size_t i = 0; i < chunks_.size(); ++i) sum += is_updated_[chunks_[i].parameter] ? norms()[i].gradient : 0;
    gradient_norm_ = std::sqrt(sum);
  }

  // As torch::nn::utils::clip_grad_norm_.
  double clip_factor(const GradientTreatment& treatment) const {
    return treatment.max_norm > 0 ? std::min(1.0, treatment.max_norm / (gradient_norm_ + 1e-6)) : 1;
  }

  void find_directions(const Step& step) {
    const double factor = clip_factor(step.treatment);
    for_own_chunks(step, [&](std::size_t number, const Chunk& chunk, auto type) {
      using T = decltype(type);
      T* const gradient = scratch<T>(number);
      scale_and_clamp(gradient, chunk.count, factor, step.treatment.max_value);
      const Run<T> run = run_of(chunk, gradient, /*trust=*/1);
      step.rule.direct(group_of(step, chunk), run);
      norms()[number].parameter = square_norm(run.parameter, chunk.count);
      norms()[number].direction = square_norm(gradient, chunk.count);
    });
    memory_->barrier(signature_of(StepPhase::kTrustRatios, number_));
    find_trust_ratios(step);
  }

  void find_trust_ratios(const Step& step) {
    std::vector<double> parameter(parameters_.size()), direction(parameters_.size());
    for (std::size_t i = 0; i < chunks_.size(); ++i) {
      parameter[chunks_[i].parameter] += norms()[i].parameter;
      direction[chunks_[i].parameter] += norms()[i].direction;
    }
    trust_.resize(parameters_.size());
    for (std::size_t i = 0; i < parameters_.size(); ++i)
      trust_[i] =
          step.rule.trust_ratio(step.groups[options_.group_of[i]], std::sqrt(parameter[i]), std::sqrt(direction[i]));
  }

  void update_from_scratch_memory(const Step& step) {
    const double factor = clip_factor(step.treatment);
    for_own_chunks(step, [&](std::size_t number, const Chunk& chunk, auto type) {
      using T = decltype(type);
      T* const gradient = scratch<T>(number);
      if (!step.rule.layerwise()) scale_and_clamp(gradient, chunk.count, factor, step.treatment.max_value);
      update(step, chunk, gradient, step.rule.layerwise() ? trust_[chunk.parameter] : 1);
    });
  }

  // mean[i]: the weighted sum over all sources, the loss scale divided out.
  template <class T>
  void sum_gradients(const Step& step, const Chunk& chunk, T* mean) const {
    const auto& weights = step.gradients.weights;
    thread_local std::vector<Term> terms;
    terms.clear();
    for (std::size_t s = 0; s < weights.size(); ++s)
      terms.push_back(
          {step.gradients.pointers[chunk.parameter * weights.size() + s], weights[s] / step.treatment.loss_scale});
    weighted_sum<T>(terms, parameters_[chunk.parameter].scalar_type(), chunk.begin, chunk.count, mean);
  }

  template <class T>
  void update(const Step& step, const Chunk& chunk, T* gradient, double trust) {
    const Run<T> run = run_of(chunk, gradient, trust);
    step.rule.update(group_of(step, chunk), run);
    if (average_) update_average(chunk, run);
    if constexpr (std::is_same_v<T, float>) store_16_bit(chunk, run.parameter);
  }

  const UpdateRule::Group& group_of(const Step& step, const Chunk& chunk) const {
    return step.groups[options_.group_of[chunk.parameter]];
  }

  template <class T>
  Run<T> run_of(const Chunk& chunk, T* gradient, double trust) {
    const std::size_t i = chunk.parameter;
    Run<T> run{
        .count = chunk.count, .parameter = values<T>(chunk), .gradient = gradient, .step = steps_[i], .trust = trust};
    for (std::size_t s = 0; s < states_.size(); ++s) run.state[s] = states_[s].of<T>(i) + chunk.begin;
    return run;
  }

  // What the rule updates: the parameter itself, or the float32 master of a 16-bit one, which its first step fills.
  template <class T>
  T* values(const Chunk& chunk) {
    const torch::Tensor& parameter = parameters_[chunk.parameter];
    if (!is_16_bit(parameter)) return stored<T>(chunk);
    T* const master = masters_.of<T>(chunk.parameter) + chunk.begin;
    if (steps_[chunk.parameter] != 1) return master;
    if (parameter.scalar_type() == torch::kBFloat16)
      convert(stored<c10::BFloat16>(chunk), chunk.count, master);
    else
      convert(stored<c10::Half>(chunk), chunk.count, master);
    return master;
  }

  template <class T>
  T* stored(const Chunk& chunk) const {
    return reinterpret_cast<T*>(data_[chunk.parameter]) + chunk.begin;
  }

  void store_16_bit(const Chunk& chunk, const float* master) const {
    const torch::ScalarType dtype = parameters_[chunk.parameter].scalar_type();
    if (dtype == torch::kBFloat16) convert(master, chunk.count, stored<c10::BFloat16>(chunk));
    if (dtype == torch::kFloat16) convert(master, chunk.count, stored<c10::Half>(chunk));
  }

  template <class T>
  void update_average(const Chunk& chunk, const Run<T>& run) {
    T* const average = average_.of<T>(chunk.parameter) + chunk.begin;
    if (run.step == 1)
      std::copy_n(run.parameter, chunk.count, average);
    else
      move_average(average, run.parameter, chunk.count, options_.ema_decay);
  }

  // Where the gradient of an own chunk is kept between two passes: private memory, 8 bytes for each element.
  template <class T>
  T* scratch(std::size_t chunk) {
    return reinterpret_cast<T*>(scratch_.data() + (chunk - first_) * kMaxRun * sizeof(double));
  }

  // Collective, in the first step that needs norms.
  void make_room_for_norms() {
    if (norms_ != nullptr) return;
    norms_ = memory_->allocate_common(std::max<std::size_t>(chunks_.size(), 1) * sizeof(Norms));
    scratch_.resize((last_ - first_) * kMaxRun * sizeof(double));
  }

  Norms* norms() const { return reinterpret_cast<Norms*>(norms_.get()); }

  std::shared_ptr<SharedMemory> memory_;
  std::vector<torch::Tensor> parameters_;
  Options options_;
  std::vector<Chunk> chunks_;
  std::size_t first_;  // this rank owns chunks [first_, last_)
  std::size_t last_;
  std::vector<SideArray> states_;
  SideArray average_;
  SideArray masters_;
  std::vector<std::int64_t> steps_;
  std::vector<std::byte*> data_;      // of each parameter, in this step
  std::vector<char> is_updated_;      // in this step, each parameter: some source has a gradient for it
  std::shared_ptr<std::byte> norms_;  // a Norms for each chunk, shared
  std::vector<std::byte> scratch_;
  std::vector<double> trust_;  // of each parameter
  double gradient_norm_ = 0;
  std::uint64_t number_ = 0;  // of the step
};

FlatUpdate::FlatUpdate(std::shared_ptr<SharedMemory> memory, std::vector<torch::Tensor> parameters, Options options)
    : impl_(std::make_unique<Impl>(std::move(memory), std::move(parameters), std::move(options))) {}
FlatUpdate::~FlatUpdate() = default;

bool FlatUpdate::run(const UpdateRule& rule, const std::vector<UpdateRule::Group>& groups,
                     const WeightedGradients& gradients, const GradientTreatment& treatment) {
  return impl_->run(rule, groups, gradients, treatment);
}
torch::Tensor FlatUpdate::state(std::size_t parameter, std::size_t number) const {
  return impl_->state(parameter, number);
}
torch::Tensor FlatUpdate::average(std::size_t parameter) const { return impl_->average(parameter); }
torch::Tensor FlatUpdate::master(std::size_t parameter) const { return impl_->master(parameter); }
std::int64_t& FlatUpdate::steps(std::size_t parameter) { return impl_->steps(parameter); }
double FlatUpdate::gradient_norm() const { return impl_->gradient_norm(); }

}  // namespace lockstep
