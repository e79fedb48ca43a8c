#include "lockstep/gradient/published_gradients.h"

#include <algorithm>
#include <limits>

#include "lockstep/base/text.h"
#include "lockstep/error.h"

namespace lockstep {
namespace {

constexpr std::uint64_t kNone = std::numeric_limits<std::uint64_t>::max();

}  // namespace

// What one source publishes; the place of each parameter's gradient follows it in memory.
struct PublishedGradients::Row {
  double samples;
  double weighted_loss;
  double unit;       // AccumulatedBatches'
  double backwards;  // 0: an unused shard

  std::uint64_t* places() { return reinterpret_cast<std::uint64_t*>(this + 1); }
  static std::size_t bytes(std::size_t parameters) { return (sizeof(Row) + 8 * parameters + 63) / 64 * 64; }
};

PublishedGradients::PublishedGradients(std::shared_ptr<SharedMemory> memory, std::vector<NamedTensor> parameters,
                                       OnFinished on_finished, int shards)
    : memory_(std::move(memory)),
      parameters_(std::move(parameters)),
      on_finished_(std::move(on_finished)),
      gradients_(memory_, parameters_),
      keep_apart_(shards > 0),
      sources_(static_cast<std::size_t>(std::max(shards, 1))),
      copies_(sources_.size() * parameters_.size()),
      tables_(memory_->allocate_common(2 * static_cast<std::size_t>(memory_->size()) * sources_.size() *
                                       Row::bytes(parameters_.size()))) {
  for (std::size_t i = 0; i < parameters_.size(); ++i) index_of_[parameters_[i].tensor.unsafeGetTensorImpl()] = i;
}

PublishedGradients::Row* PublishedGradients::row(int turn, int rank, int source) const {
  const auto number =
      (static_cast<std::size_t>(turn) * static_cast<std::size_t>(memory_->size()) + static_cast<std::size_t>(rank)) *
          sources_.size() +
      static_cast<std::size_t>(source);
  return reinterpret_cast<Row*>(tables_.get() + number * Row::bytes(parameters_.size()));
}

void PublishedGradients::backward(const torch::Tensor& loss, std::int64_t samples) {
  if (failed_)
    throw UsageError({.what = "backward() was called after one that failed half-way",
                      .likely = "an exception in backward() that was caught and passed over",
                      .next = "let it end the program, and go on from a checkpoint"});
  forget_dropped_gradients();
  Source& source = current_source();
  const torch::Tensor seed = source.batch.add(samples, loss);
  if (samples > 0) {
    failed_ = true;  // until it is over
    const GradientMemory::Scope in_sight_of_peers(gradients_);
    loss.backward(seed);
    failed_ = false;
  }
  if (keep_apart_) keep_apart(source);
}

// After a zero_grad() without a step() before it.
void PublishedGradients::forget_dropped_gradients() {
  if (keep_apart_ || sources_.front().batch.samples == 0) return;  // without samples there was none to drop
  const bool any =
      std::any_of(parameters_.begin(), parameters_.end(), [](const auto& p) { return p.tensor.grad().defined(); });
  if (!any) sources_.front() = {};
}

// The one that the next backward() adds to: the next shard if shards stay apart.
PublishedGradients::Source& PublishedGradients::current_source() {
  const auto untouched =
      std::find_if(sources_.begin(), sources_.end(), [](const Source& s) { return s.batch.backwards == 0; });
  if (!keep_apart_) return sources_.front();
  if (untouched == sources_.end())
    throw UsageError(
        {.what = concat("more than ", sources_.size(), " backward() in a step with as many shards on this rank"),
         .next = "call step() after the last shard"});
  return *untouched;
}

void PublishedGradients::gather_gradients(Source& source) {
  source.gradients.clear();
  for (const auto& [name, parameter] : parameters_)
    source.gradients.push_back(source.batch.samples > 0 ? parameter.grad() : torch::Tensor());
}

void PublishedGradients::keep_apart(Source& source) {
  gather_gradients(source);
  for (auto& [name, parameter] : parameters_) parameter.mutable_grad().reset();
}

BatchTotals PublishedGradients::finish() {
  if (sources_.front().batch.backwards == 0) sources_.front().batch.add_unknown();  // after a plain loss.backward()
  if (!keep_apart_) gather_gradients(sources_.front());
  const int turn = static_cast<int>(++finished_ % 2);
  for (std::size_t i = 0; i < sources_.size(); ++i)
    publish(sources_[i], row(turn, memory_->rank(), static_cast<int>(i)));
  remember_gradients();
  published_ = true;
  memory_->barrier();
  const BatchTotals totals = read_totals();
  if (on_finished_) on_finished_(totals);
  return totals;
}

void PublishedGradients::publish(const Source& source, Row* row) {
  *row = {source.batch.samples, source.batch.loss(), source.batch.unit, static_cast<double>(source.batch.backwards)};
  const std::size_t first = static_cast<std::size_t>(&source - sources_.data()) * parameters_.size();
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    const bool has_one =
        i < source.gradients.size() && source.gradients[i].defined() && source.gradients[i].numel() > 0;
    row->places()[i] = has_one ? place_for_peers(first + i, source.gradients[i]) : kNone;
  }
}

std::uint64_t PublishedGradients::place_for_peers(std::size_t number, const torch::Tensor& gradient) {
  const torch::NoGradGuard no_grad;
  const torch::Tensor& parameter = parameters_[number % parameters_.size()].tensor;
  if (gradient.layout() == torch::kStrided && gradient.strides() == parameter.strides())
    if (const auto place = gradients_.place_of(gradient)) return *place;
  SharedMemory::Own& copy = copies_[number];
  if (copy.data == nullptr) copy = memory_->allocate(parameter.nbytes());
  torch::from_blob(copy.data.get(), parameter.sizes(), parameter.strides(), parameter.options().requires_grad(false))
      .copy_(gradient.layout() == torch::kStrided ? gradient : gradient.to_dense());
  return copy.place;
}

BatchTotals PublishedGradients::read_totals() {
  double samples = 0;
  double loss = 0;
  const int turn = static_cast<int>(finished_ % 2);
  for (int rank = 0; rank < memory_->size(); ++rank)
    for (int source = 0; source < static_cast<int>(sources_.size()); ++source) {
      samples += row(turn, rank, source)->samples;
      loss += row(turn, rank, source)->weighted_loss;
    }
  return {static_cast<std::int64_t>(samples), loss / samples};
}

std::vector<double> PublishedGradients::weights() const {
  const int turn = static_cast<int>(finished_ % 2);
  std::vector<double> weights;
  double samples = 0;
  double backwards =
      std::numeric_limits<double>::infinity();  // of each rank; one without samples may count dropped ones
  for (int rank = 0; rank < memory_->size(); ++rank)
    for (int source = 0; source < static_cast<int>(sources_.size()); ++source) {
      const Row& one = *row(turn, rank, source);
      samples += one.samples;
      weights.push_back(one.unit);
      if (one.backwards > 0) backwards = std::min(backwards, one.backwards);
    }
  for (double& weight : weights) weight = samples > 0 ? weight * backwards / samples : 0;
  return weights;
}

void PublishedGradients::remember_gradients() {
  seen_.clear();
  for (const auto& [name, parameter] : parameters_) {
    const torch::Tensor& gradient = parameter.grad();
    seen_.push_back({gradient.unsafeGetTensorImpl(), gradient.defined() ? gradient._version() : 0});
  }
}

void PublishedGradients::require_unchanged() const {
  for (std::size_t i = 0; i < seen_.size(); ++i) {
    const torch::Tensor& gradient = parameters_[i].tensor.grad();
    if (gradient.unsafeGetTensorImpl() == seen_[i].gradient &&
        (!gradient.defined() || gradient._version() == seen_[i].version))
      continue;
    throw UsageError(
        {.what = concat("the gradient of ", parameters_[i].name, " was changed between backward() and step()"),
         .likely = "clipping by hand, zero_grad() before step(), or a plain loss.backward() in between: here "
                   ".grad is this rank's own gradient, not yet the mean",
         .next = "clip with optimizer.set_clipping(); or give DistributedDataParallel the option "
                 "share_parameters = false, and .grad is the mean"});
  }
}

StepGradients PublishedGradients::take(const std::vector<torch::Tensor>& parameters) {
  if (!published_) finish();
  require_unchanged();
  StepGradients step{.weights = weights()};
  const int turn = static_cast<int>(finished_ % 2);
  for (const torch::Tensor& parameter : parameters) {
    const auto found = index_of_.find(parameter.unsafeGetTensorImpl());
    for (int rank = 0; rank < memory_->size(); ++rank)
      for (int source = 0; source < static_cast<int>(sources_.size()); ++source) {
        const bool trained = found != index_of_.end();  // not so: frozen
        const std::uint64_t place = trained ? row(turn, rank, source)->places()[found->second] : kNone;
        step.pointers.push_back(place == kNone ? nullptr : memory_->peer(rank, place, parameter.nbytes()));
      }
  }
  return step;
}

void PublishedGradients::updated() {
  memory_->barrier();
  published_ = false;
  for (Source& source : sources_) source = {};
}

}  // namespace lockstep
