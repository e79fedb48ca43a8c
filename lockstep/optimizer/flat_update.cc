#include "lockstep/optimizer/flat_update.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "lockstep/base/cache_line.h"
#include "lockstep/optimizer/mean.h"

namespace lockstep {
namespace {

constexpr std::int64_t kPiecesPerTask = 8;

bool is_16_bit(const torch::Tensor& tensor) { return tensor.element_size() == 2; }

torch::ScalarType computed_in(const torch::Tensor& parameter) {
  return parameter.scalar_type() == torch::kFloat64 ? torch::kFloat64 : torch::kFloat32;
}

// An array beside each of some parameters, in one piece of memory.
class SideArray {
 public:
  SideArray() = default;
  template <class Wanted>
  SideArray(SharedMemory& memory, const std::vector<FlatUpdate::Parameter>& parameters, Wanted wanted) {
    std::size_t bytes = 0;
    for (const auto& [tensor, group] : parameters) {
      offsets_.push_back(bytes);
      if (wanted(tensor))
        bytes += round_up(static_cast<std::size_t>(tensor.numel()) * c10::elementSize(computed_in(tensor)), kCacheLine);
    }
    data_ = memory.allocate_common(bytes);
  }

  explicit operator bool() const { return data_ != nullptr; }

  template <class T>
  T* of(std::size_t parameter) const {
    return reinterpret_cast<T*>(data_.get() + offsets_[parameter]);
  }

  torch::Tensor view(std::size_t parameter, const torch::Tensor& like) const {
    return torch::from_blob(
        of<std::byte>(parameter), like.sizes(), like.strides(), [keep = data_](void*) {},
        torch::TensorOptions().dtype(computed_in(like)));
  }

 private:
  std::shared_ptr<std::byte> data_;
  std::vector<std::size_t> offsets_;
};

// Elements [begin, begin + count) of a parameter.
struct Piece {
  std::size_t parameter;
  std::int64_t begin;
  std::int64_t count;
};

// Squares of 2-norms over one piece, as its owner found them.
struct Norms {
  double gradient;
  double parameter;
  double direction;
};

std::vector<Piece> cut(const std::vector<FlatUpdate::Parameter>& parameters) {
  std::vector<Piece> pieces;
  for (std::size_t i = 0; i < parameters.size(); ++i)
    for (std::int64_t begin = 0; begin < parameters[i].tensor.numel(); begin += kMaxRun)
      pieces.push_back({i, begin, std::min(kMaxRun, parameters[i].tensor.numel() - begin)});
  return pieces;
}

// The first piece of each rank: equal numbers of elements, as far as pieces allow.
std::size_t first_of(int rank, int ranks, const std::vector<Piece>& pieces) {
  std::int64_t all = 0;
  for (const Piece& piece : pieces) all += piece.count;
  std::int64_t before = 0;
  std::size_t i = 0;
  for (; i < pieces.size() && before * ranks < all * rank; ++i) before += pieces[i].count;
  return i;
}

template <class T>
double square_norm(const T* values, std::int64_t count) {
  double sum = 0;
  for (std::int64_t i = 0; i < count; ++i) sum += static_cast<double>(values[i]) * static_cast<double>(values[i]);
  return sum;
}

template <class T>
void scale_and_cut(T* __restrict gradient, std::int64_t count, double factor, double max_value) {
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

class FlatUpdate::Impl {
 public:
  Impl(std::shared_ptr<SharedMemory> memory, std::vector<Parameter> parameters, const Options& options)
      : memory_(std::move(memory)), parameters_(std::move(parameters)), options_(options), pieces_(cut(parameters_)) {
    const auto every = [](const torch::Tensor&) { return true; };
    for (std::size_t i = 0; i < options.states; ++i) states_.emplace_back(*memory_, parameters_, every);
    if (options.ema_decay > 0) average_ = SideArray(*memory_, parameters_, every);
    if (std::any_of(parameters_.begin(), parameters_.end(), [](const auto& p) { return is_16_bit(p.tensor); }))
      masters_ = SideArray(*memory_, parameters_, is_16_bit);
    first_ = first_of(memory_->rank(), memory_->size(), pieces_);
    last_ = first_of(memory_->rank() + 1, memory_->size(), pieces_);
    steps_.resize(parameters_.size());
    data_.resize(parameters_.size());
  }

  bool run(const UpdateRule& rule, const std::vector<UpdateRule::Group>& groups, const StepGradients& gradients,
           const GradientTreatment& treatment) {
    const Step step{rule, groups, gradients, treatment};
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
    update_from_scratch(step);
    return true;
  }

  torch::Tensor state(std::size_t i, std::size_t number) const {
    return states_[number].view(i, parameters_[i].tensor);
  }
  torch::Tensor average(std::size_t i) const {
    return average_ ? average_.view(i, parameters_[i].tensor) : torch::Tensor();
  }
  torch::Tensor master(std::size_t i) const {
    return is_16_bit(parameters_[i].tensor) ? masters_.view(i, parameters_[i].tensor) : torch::Tensor();
  }
  std::int64_t& steps(std::size_t i) { return steps_[i]; }
  double gradient_norm() const { return gradient_norm_; }

 private:
  struct Step {
    const UpdateRule& rule;
    const std::vector<UpdateRule::Group>& groups;
    const StepGradients& gradients;
    const GradientTreatment& treatment;
  };

  void begin(const Step& step) {
    const std::size_t sources = step.gradients.weights.size();
    active_.assign(parameters_.size(), false);
    for (std::size_t i = 0; i < parameters_.size(); ++i) {
      data_[i] = static_cast<std::byte*>(parameters_[i].tensor.mutable_data_ptr());
      for (std::size_t s = 0; s < sources; ++s)
        active_[i] = active_[i] || step.gradients.pointers[i * sources + s] != nullptr;
    }
  }

  void count_steps() {
    for (std::size_t i = 0; i < parameters_.size(); ++i) steps_[i] += active_[i] ? 1 : 0;
  }

  // Calls each(piece, number, T()) for this rank's pieces that take part, T being what the parameter is computed in.
  template <class Each>
  void for_own_pieces(const Step& step, const Each& each) {
    const auto part = [&](std::int64_t from, std::int64_t to) {
      for (auto i = static_cast<std::size_t>(from); i < static_cast<std::size_t>(to); ++i) {
        const Piece& piece = pieces_[i];
        if (!active_[piece.parameter]) continue;
        if (computed_in(parameters_[piece.parameter].tensor) == torch::kFloat64)
          each(piece, i, double());
        else
          each(piece, i, float());
      }
    };
    const auto begin = static_cast<std::int64_t>(first_);
    const auto end = static_cast<std::int64_t>(last_);
    step.gradients.parallel_for(begin, end, kPiecesPerTask, part);
  }

  void update_in_one_pass(const Step& step) {
    for_own_pieces(step, [&](const Piece& piece, std::size_t, auto type) {
      using T = decltype(type);
      alignas(kCacheLine) T gradient[kMaxRun];
      take_mean(piece, step, gradient);
      if (step.treatment.max_value > 0) scale_and_cut(gradient, piece.count, 1, step.treatment.max_value);
      update(piece, step, gradient, 1);
    });
  }

  // The mean gradient of every own piece into scratch memory, and its norm over all ranks.
  void reduce(const Step& step) {
    make_room_for_norms();
    for_own_pieces(step, [&](const Piece& piece, std::size_t number, auto type) {
      using T = decltype(type);
      T* const gradient = scratch<T>(number);
      take_mean(piece, step, gradient);
      norms()[number].gradient = square_norm(gradient, piece.count);
    });
    memory_->barrier();
    double sum = 0;
    for (std::size_t i = 0; i < pieces_.size(); ++i) sum += active_[pieces_[i].parameter] ? norms()[i].gradient : 0;
    gradient_norm_ = std::sqrt(sum);
  }

  // As torch::nn::utils::clip_grad_norm_.
  double clip_factor(const GradientTreatment& treatment) const {
    return treatment.max_norm > 0 ? std::min(1.0, treatment.max_norm / (gradient_norm_ + 1e-6)) : 1;
  }

  void find_directions(const Step& step) {
    const double factor = clip_factor(step.treatment);
    for_own_pieces(step, [&](const Piece& piece, std::size_t number, auto type) {
      using T = decltype(type);
      T* const gradient = scratch<T>(number);
      scale_and_cut(gradient, piece.count, factor, step.treatment.max_value);
      const Run<T> run = run_of(piece, gradient, 1);
      step.rule.direct(group_of(piece, step), run);
      norms()[number].parameter = square_norm(run.parameter, piece.count);
      norms()[number].direction = square_norm(gradient, piece.count);
    });
    memory_->barrier();
    trust_.assign(parameters_.size(), 0);
    std::vector<double> direction(parameters_.size());
    for (std::size_t i = 0; i < pieces_.size(); ++i) {
      trust_[pieces_[i].parameter] += norms()[i].parameter;
      direction[pieces_[i].parameter] += norms()[i].direction;
    }
    for (std::size_t i = 0; i < parameters_.size(); ++i)
      trust_[i] =
          step.rule.trust_ratio(step.groups[parameters_[i].group], std::sqrt(trust_[i]), std::sqrt(direction[i]));
  }

  void update_from_scratch(const Step& step) {
    const double factor = clip_factor(step.treatment);
    for_own_pieces(step, [&](const Piece& piece, std::size_t number, auto type) {
      using T = decltype(type);
      T* const gradient = scratch<T>(number);
      if (!step.rule.layerwise()) scale_and_cut(gradient, piece.count, factor, step.treatment.max_value);
      update(piece, step, gradient, step.rule.layerwise() ? trust_[piece.parameter] : 1);
    });
  }

  template <class T>
  void take_mean(const Piece& piece, const Step& step, T* mean) const {
    const auto& weights = step.gradients.weights;
    const auto& pointers = step.gradients.pointers;
    thread_local std::vector<Term> terms;
    terms.clear();
    for (std::size_t s = 0; s < weights.size(); ++s)
      terms.push_back({pointers[piece.parameter * weights.size() + s], weights[s] / step.treatment.loss_scale});
    const torch::Tensor& parameter = parameters_[piece.parameter].tensor;
    weighted_sum<T>(terms, parameter.scalar_type(), piece.begin, piece.count, mean);
  }

  template <class T>
  void update(const Piece& piece, const Step& step, T* gradient, double trust) {
    const Run<T> run = run_of(piece, gradient, trust);
    step.rule.update(group_of(piece, step), run);
    if (average_) follow(piece, run);
    if constexpr (std::is_same_v<T, float>) store_16_bit(piece, run.parameter);
  }

  const UpdateRule::Group& group_of(const Piece& piece, const Step& step) const {
    return step.groups[parameters_[piece.parameter].group];
  }

  template <class T>
  Run<T> run_of(const Piece& piece, T* gradient, double trust) {
    const std::size_t i = piece.parameter;
    Run<T> run{
        .count = piece.count, .parameter = values<T>(piece), .gradient = gradient, .step = steps_[i], .trust = trust};
    for (std::size_t s = 0; s < states_.size(); ++s) run.state[s] = states_[s].of<T>(i) + piece.begin;
    return run;
  }

  // Where the rule finds the parameter: itself, or the float32 master of a 16-bit one, which its first step makes.
  template <class T>
  T* values(const Piece& piece) {
    const torch::Tensor& parameter = parameters_[piece.parameter].tensor;
    if (!is_16_bit(parameter)) return reinterpret_cast<T*>(data_[piece.parameter]) + piece.begin;
    T* const master = masters_.of<T>(piece.parameter) + piece.begin;
    if (steps_[piece.parameter] == 1) {
      if (parameter.scalar_type() == torch::kBFloat16)
        convert(stored<c10::BFloat16>(piece), piece.count, master);
      else
        convert(stored<c10::Half>(piece), piece.count, master);
    }
    return master;
  }

  template <class T>
  T* stored(const Piece& piece) const {
    return reinterpret_cast<T*>(data_[piece.parameter]) + piece.begin;
  }

  void store_16_bit(const Piece& piece, const float* master) const {
    const torch::ScalarType dtype = parameters_[piece.parameter].tensor.scalar_type();
    if (dtype == torch::kBFloat16) convert(master, piece.count, stored<c10::BFloat16>(piece));
    if (dtype == torch::kFloat16) convert(master, piece.count, stored<c10::Half>(piece));
  }

  template <class T>
  void follow(const Piece& piece, const Run<T>& run) {
    T* const average = average_.of<T>(piece.parameter) + piece.begin;
    if (run.step == 1)
      std::copy_n(run.parameter, piece.count, average);
    else
      move_average(average, run.parameter, piece.count, options_.ema_decay);
  }

  // Scratch memory is this rank's own: piece by piece, 8 bytes per element.
  template <class T>
  T* scratch(std::size_t piece) {
    return reinterpret_cast<T*>(scratch_.data() + (piece - first_) * kMaxRun * sizeof(double));
  }

  void make_room_for_norms() {
    if (norms_ != nullptr) return;
    norms_ = memory_->allocate_common(std::max<std::size_t>(pieces_.size(), 1) * sizeof(Norms));
    scratch_.resize((last_ - first_) * kMaxRun * sizeof(double));
  }

  Norms* norms() const { return reinterpret_cast<Norms*>(norms_.get()); }

  std::shared_ptr<SharedMemory> memory_;
  std::vector<Parameter> parameters_;
  Options options_;
  std::vector<Piece> pieces_;
  std::size_t first_ = 0;  // of the pieces that are this rank's
  std::size_t last_ = 0;
  std::vector<SideArray> states_;
  SideArray average_;
  SideArray masters_;
  std::vector<std::int64_t> steps_;
  std::vector<std::byte*> data_;  // of each parameter, in this step
  std::vector<char> active_;      // which parameters take part in this step
  std::shared_ptr<std::byte> norms_;
  std::vector<std::byte> scratch_;
  std::vector<double> trust_;
  double gradient_norm_ = 0;
};

FlatUpdate::FlatUpdate(std::shared_ptr<SharedMemory> memory, std::vector<Parameter> parameters, const Options& options)
    : impl_(std::make_unique<Impl>(std::move(memory), std::move(parameters), options)) {}
FlatUpdate::~FlatUpdate() = default;

bool FlatUpdate::run(const UpdateRule& rule, const std::vector<UpdateRule::Group>& groups,
                     const StepGradients& gradients, const GradientTreatment& treatment) {
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
