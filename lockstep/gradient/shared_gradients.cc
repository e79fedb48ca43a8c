// SPDX-License-Identifier: Apache-2.0
#include "lockstep/gradient/shared_gradients.h"

#include <algorithm>
#include <array>
#include <limits>
#include <optional>

#include "lockstep/base/cache_line.h"
#include "lockstep/base/stop.h"
#include "lockstep/base/text.h"
#include "lockstep/error.h"

namespace lockstep {
namespace {

constexpr std::uint64_t kNoGradient = std::numeric_limits<std::uint64_t>::max();

// How a rank has come to an exchange. One without samples may be in join(), where it can't know whether the others call
// backward(), or step() after a plain loss.backward().
enum Way { kBackward, kBackwardWithoutSamples, kStep, kStepWithoutSamples, kStepWithoutBackward, kWays };
constexpr std::array kNamesOfWays = {"in backward()", "in backward() without samples",
                                     "in step() after loss.backward() or no_sync()",
                                     "in step() after a backward() without samples", "in step() without a backward()"};
constexpr std::pair<Way, Way> kDifferentCalls[] = {{kBackward, kStep},
                                                   {kBackward, kStepWithoutSamples},
                                                   {kBackward, kStepWithoutBackward},
                                                   {kBackwardWithoutSamples, kStepWithoutBackward},
                                                   {kStep, kStepWithoutBackward}};

// What one source publishes. The place of each parameter's gradient (8 bytes each) follows it in memory.
struct Row {
  double samples;
  double weighted_loss;  // sum of m_t loss_t
  double unit;           // AccumulatedBatches::unit
  double backwards;      // 0: a shard that was not used
  double leading;        // of these, those before the first with samples
  double in_step;        // 1: published by step(), 0: by backward()
  double stop;           // 1: this rank's process was asked to stop
  RankWeight weight;

  Way way() const {
    if (in_step == 0) return samples > 0 ? kBackward : kBackwardWithoutSamples;
    if (backwards == 0) return kStepWithoutBackward;
    return samples > 0 ? kStep : kStepWithoutSamples;
  }
  std::uint64_t* places() { return reinterpret_cast<std::uint64_t*>(this + 1); }
};

}  // namespace

// Note [The publication table]
// Two tables in memory that all ranks share, used alternately. Each has a row per source, ordered by rank, then by the
// rank's shard; a row of P parameters takes 72 + 8 P bytes, rounded up to cache lines, so that no two ranks write to
// the same line. A rank writes its own rows only, before barrier 1, and reads all rows after it.
class SharedGradients::Table {
 public:
  Table(SharedMemory& memory, std::size_t sources, std::size_t parameters)
      : sources_(sources),
        rows_(sources * memory.size()),
        first_(sources * memory.rank()),
        row_bytes_(round_up(sizeof(Row) + sizeof(std::uint64_t) * parameters, kCacheLine)),
        data_(memory.allocate_common(2 * rows_ * row_bytes_)) {}

  void begin_exchange() { current_ = 1 - current_; }

  std::size_t rows() const { return rows_; }  // one per source of each rank
  Row& row(std::size_t index) const {
    return *reinterpret_cast<Row*>(data_.get() + (current_ * rows_ + index) * row_bytes_);
  }
  Row& own(std::size_t source) const { return row(first_ + source); }
  int rank_of(std::size_t row) const { return static_cast<int>(row / sources_); }

 private:
  std::size_t sources_;  // of each rank
  std::size_t rows_;
  std::size_t first_;  // row of this rank
  std::size_t row_bytes_;
  std::shared_ptr<std::byte> data_;
  std::size_t current_ = 0;  // table
};

SharedGradients::SharedGradients(std::shared_ptr<SharedMemory> memory, std::vector<NamedTensor> parameters,
                                 SharedGradientsOptions options)
    : memory_(std::move(memory)),
      parameters_(std::move(parameters)),
      options_(std::move(options)),
      gradient_memory_(memory_, parameters_),
      sources_(std::max(options_.shards, 1)),
      copies_(sources_.size() * parameters_.size()),
      table_(std::make_unique<Table>(*memory_, sources_.size(), parameters_.size())),
      agreement_(memory_) {
  if (options_.updated.empty()) options_.updated = parameters_;
  for (std::size_t i = 0; i < parameters_.size(); ++i) index_of_[parameters_[i].tensor.unsafeGetTensorImpl()] = i;
}
SharedGradients::~SharedGradients() = default;

std::size_t SharedGradients::kept_sources() const { return memory_->outlives_ranks() ? table_->rows() : 0; }

double SharedGradients::begin(const BatchWeight& batch, const torch::Tensor& loss) {
  memory_->require_own_process();  // .grad is in memory that its parent uses, too
  if (failed_) throw after_failed_backward();
  guards_.clear();
  if (!forget_dropped_gradients()) require_only_counted_gradients(batch.samples);
  if (sources_.front().batches.is_plain) sources_.front() = {};  // gradients of zero, which a step() has counted
  begun_ = &current_source();
  const double factor = begun_->batches.add(batch, loss);
  failed_ = true;  // unless end() is called
  scope_.emplace(gradient_memory_);
  return factor;
}

void SharedGradients::end(bool exchanges) {
  scope_.reset();
  failed_ = false;
  if (options_.shards > 0) {
    take_grads(*begun_);
    for (auto& [name, parameter] : parameters_) parameter.mutable_grad().reset();
  }
  if (exchanges) return;
  is_published_ = has_stepped_ = false;  // to be published before the next step; a zero_grad() drops what is counted
  watch_.remember(options_.updated);
}

void SharedGradients::cancel(const std::string& reason) {
  scope_.reset();
  failed_ = true;
  memory_->fail(reason);
}

// After a zero_grad() what was counted until then no longer counts. Returns whether it has found one, and nothing since.
bool SharedGradients::forget_dropped_gradients() {
  if (options_.shards > 0 || sources_.front().batches.samples == 0) return false;  // there was no gradient
  const bool any = std::any_of(options_.updated.begin(), options_.updated.end(),
                               [](const auto& p) { return p.tensor.grad().defined(); });
  const bool nothing = !any || watch_.zeroed();
  if (!nothing && !watch_.dropped()) return false;
  sources_.front() = {};
  return nothing;
}

void SharedGradients::drop() {
  for (Source& source : sources_) source = {};
  is_published_ = false;
}

// A backward() is about to add to .grad, where there must be no more than what was counted.
void SharedGradients::require_only_counted_gradients(std::int64_t samples) const {
  const AccumulatedBatches& batches = sources_.front().batches;
  if (options_.shards > 0) return;
  if (batches.samples > 0 && !batches.is_plain) return require_unchanged_grads();
  if (samples == 0) return;
  if (const auto uncounted = first_with_gradient(options_.updated))
    throw UsageError({.what = concat("backward() would add to a gradient of ", options_.updated[*uncounted].name,
                                     " that it has not counted"),
                      .likely = "a plain loss.backward(), or a gradient that was set by hand, and no zero_grad() since",
                      .next = "call zero_grad() first; don't mix ddp.backward() and loss.backward() in one step"});
}

// Before an exchange in step(): what a plain loss.backward() has left in .grad counts as one sample.
void SharedGradients::count_what_step_finds() {
  if (options_.shards > 0)
    throw UsageError({.what = concat("step() before all of the ", sources_.size(),
                                     " backward() of a step with as many shards on this rank"),
                      .next = "call ddp.backward() for each shard first"});
  forget_dropped_gradients();
  AccumulatedBatches& batches = sources_.front().batches;
  // After a step(), zero_grad(false) and loss.backward() can't be told from loss.backward() alone.
  const bool known = batches.samples > 0 && !batches.is_plain;
  if (known && !(has_stepped_ && watch_.changed())) return require_unchanged_grads();
  if (batches.backwards > 0 && batches.samples == 0 && !watch_.changed()) return;  // backward() without samples
  const bool any =
      std::any_of(parameters_.begin(), parameters_.end(), [](const auto& p) { return p.tensor.grad().defined(); });
  batches = {};
  if (any) batches.add_unknown();
}

// The source that the next backward() adds to: the next unused shard, or the only source.
SharedGradients::Source& SharedGradients::current_source() {
  if (options_.shards == 0) return sources_.front();
  const auto unused =
      std::find_if(sources_.begin(), sources_.end(), [](const Source& s) { return s.batches.backwards == 0; });
  if (unused == sources_.end())
    throw UsageError(
        {.what = concat("more than ", sources_.size(), " backward() in a step with as many shards on this rank"),
         .next = "call step() after the last shard"});
  return *unused;
}

void SharedGradients::take_grads(Source& source) const {
  source.gradients.clear();
  source.gradients.reserve(parameters_.size());
  for (const auto& [name, parameter] : parameters_)
    source.gradients.push_back(source.batches.samples > 0 ? parameter.grad() : torch::Tensor());
}

BatchTotals SharedGradients::exchange(bool in_step) {
  if (options_.block) options_.block->require_not_moved();  // copies have the size of the parameters as they were
  if (in_step) count_what_step_finds();
  if (options_.shards == 0) take_grads(sources_.front());
  table_->begin_exchange();
  for (std::size_t i = 0; i < sources_.size(); ++i) publish(i, in_step);
  watch_.remember(options_.updated);
  if (check_interval() > 0) protect_gradients();
  is_published_ = true;
  has_stepped_ = false;
  agreement_.backward();  // barrier 1: all rows are written
  require_same_calls();
  const BatchTotals totals = this->totals();
  if (options_.on_finished) options_.on_finished(totals);
  return totals;
}

void SharedGradients::publish(std::size_t source, bool in_step) {
  const auto& [batches, gradients] = sources_[source];
  Row& row = table_->own(source);
  row = {batches.samples,
         batches.loss(),
         batches.unit,
         static_cast<double>(batches.backwards),
         static_cast<double>(batches.leading),
         in_step ? 1.0 : 0.0,
         wants_to_stop() ? 1.0 : 0.0,
         batches.weight_of_rank};
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    const bool has_one = i < gradients.size() && gradients[i].defined() && gradients[i].numel() > 0;
    row.places()[i] = has_one ? place_for_peers(source, i) : kNoGradient;
  }
}

// All ranks read the same rows, and so throw together.
void SharedGradients::require_same_calls() const {
  std::array<std::optional<int>, kWays> first{};  // rank that came in this way
  for (std::size_t i = 0; i < table_->rows(); ++i)
    if (auto& rank = first[table_->row(i).way()]; !rank) rank = table_->rank_of(i);
  for (const auto& [one, other] : kDifferentCalls)
    if (first[one] && first[other])
      throw calls_differ({.what = concat("rank ", *first[one], " is ", kNamesOfWays[one], ", rank ", *first[other], " ",
                                         kNamesOfWays[other]),
                          .here = concat("rank ", memory_->rank(), " of ", memory_->size(), " on this machine")});
}

BatchTotals SharedGradients::totals() {
  double samples = 0, loss = 0;
  std::vector<RankWeight> weights;
  for (std::size_t i = 0; i < table_->rows(); ++i) {
    weights.push_back(table_->row(i).weight);
    samples += table_->row(i).samples;
    loss += table_->row(i).weighted_loss;
    if (table_->row(i).stop > 0) agree_to_stop();
  }
  ranks_alike_ = compare_weights(weights, memory_->rank());
  return {static_cast<std::int64_t>(samples), loss / samples};
}

// Where the other ranks find the gradient: where autograd wrote it, if that is in shared memory and in the parameter's
// memory order, else in a copy.
std::uint64_t SharedGradients::place_for_peers(std::size_t source, std::size_t i) {
  const torch::NoGradGuard no_grad;
  const torch::Tensor& parameter = parameters_[i].tensor;
  const torch::Tensor& gradient = sources_[source].gradients[i];
  if (gradient.layout() == torch::kStrided && gradient.strides() == parameter.strides())
    if (const auto place = gradient_memory_.place_of(gradient)) return *place;
  SharedMemory::Own& copy = copies_[source * parameters_.size() + i];
  if (copy.data == nullptr) copy = memory_->allocate(parameter.nbytes());
  torch::from_blob(copy.data.get(), parameter.sizes(), parameter.strides(), parameter.options().requires_grad(false))
      .copy_(gradient.layout() == torch::kStrided ? gradient : gradient.to_dense());
  return copy.place;
}

// Gradients elsewhere, such as sparse ones, were copied: step() finds a write to .grad.
void SharedGradients::protect_gradients() {
  guards_.clear();
  for (const Source& source : sources_)
    for (std::size_t i = 0; i < source.gradients.size(); ++i)
      if (const torch::Tensor& gradient = source.gradients[i];
          gradient.defined() && gradient_memory_.place_of(gradient))
        guards_.emplace_back(
            PageGuard::Kind::kGradients,
            std::vector<PageGuard::Part>{
                {parameters_[i].name, static_cast<const std::byte*>(gradient.const_data_ptr()), gradient.nbytes()}});
}

void SharedGradients::require_unchanged_grads() const {
  if (const auto changed = watch_.changed())
    throw UsageError(
        {.what =
             concat("the gradient of ", options_.updated[*changed].name, " was changed between backward() and step()"),
         .likely = "clipping by hand, zero_grad() before step(), or a plain loss.backward() in between: here "
                   ".grad is this rank's own gradient, not yet the mean",
         .next =
             "clip inside step(): optimizer.clip_grad_norm() in Python, without GradScaler.unscale_(); set_clipping() "
             "in C++. Or give DistributedDataParallel the option mean_in_grad = true"});
}

WeightedGradients SharedGradients::begin_update(const std::vector<torch::Tensor>& parameters,
                                                const StepSettings& settings) {
  require_open();
  if (failed_) throw after_failed_backward({}, "step() was called after a backward()");
  if (options_.block) {
    options_.block->require_in_place();
    options_.block->require_same_samples();
  }
  if (!is_published_) exchange(/*in_step=*/true);
  require_unchanged_grads();
  WeightedGradients gradients{.weights = weights()};
  gradients.pointers.reserve(parameters.size() * table_->rows());
  agreement_.step(settings);  // barrier 2
  if (options_.block) options_.block->begin_write();
  for (const torch::Tensor& parameter : parameters) {
    const auto found = index_of_.find(parameter.unsafeGetTensorImpl());  // none: frozen
    for (std::size_t i = 0; i < table_->rows(); ++i) {
      const std::uint64_t place = found == index_of_.end() ? kNoGradient : table_->row(i).places()[found->second];
      gradients.pointers.push_back(place == kNoGradient ? nullptr
                                                        : memory_->peer(table_->rank_of(i), place, parameter.nbytes()));
    }
  }
  return gradients;
}

// The weight of a source with unit u is u T / n: n samples in all, T backward() per step. Of n ranks that count alike it
// is 1 / n.
std::vector<double> SharedGradients::weights() const {
  std::vector<double> weights;
  double samples = 0;
  for (std::size_t i = 0; i < table_->rows(); ++i) {
    samples += table_->row(i).samples;
    weights.push_back(table_->row(i).unit);
  }
  const double backwards = backwards_per_step();
  double factor = samples > 0 ? backwards / samples : 0;
  if (ranks_alike_ > 0) factor = 1 / ranks_alike_;
  for (double& weight : weights) weight *= factor;
  return weights;
}

// T. A rank that had no samples at first may have counted backward() whose gradients the others have dropped since, by
// zero_grad(): of its b backward() at least those since the first with samples count, b - leading, and at most b. A rank
// without any samples, such as one in join(), leaves it to the others.
double SharedGradients::backwards_per_step() const {
  std::size_t most = 0;  // the row with the most backward() that count for sure
  const auto least = [&](std::size_t i) {
    return table_->row(i).samples > 0 ? table_->row(i).backwards - table_->row(i).leading : 0;
  };
  for (std::size_t i = 1; i < table_->rows(); ++i)
    if (least(i) > least(most)) most = i;
  for (std::size_t i = 0; i < table_->rows(); ++i)
    if (table_->row(i).samples > 0 && table_->row(i).backwards < least(most))
      throw MismatchError(
          {.what =
               concat("rank ", table_->rank_of(i), " called backward() ", table_->row(i).backwards,
                      " times since the last zero_grad(), rank ", table_->rank_of(most), " ", least(most), " times"),
           .likely = "no_sync() or zero_grad() on some ranks only",
           .next = "call backward() equally often on all ranks; with 0 samples where a rank has no batch"});
  return least(most);
}

void SharedGradients::end_update() {
  if (options_.block) options_.block->end_write();
  agreement_.end_step();  // barrier 3: no rank reads gradients any more, and all slices are updated
  is_published_ = false;
  has_stepped_ = true;
  guards_.clear();
  for (Source& source : sources_)
    if (options_.shards > 0)
      source = {};
    else
      source.gradients.clear();  // zero_grad() gives their memory back; until then they count
  if (options_.block) options_.block->mark_written();
}

}  // namespace lockstep
