// SPDX-License-Identifier: Apache-2.0
#include "lockstep/ddp.h"

#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <optional>
#include <unordered_set>
#include <utility>

#include "lockstep/base/text.h"
#include "lockstep/base/trace.h"
#include "lockstep/collective/operator_spans.h"
#include "lockstep/deadline.h"
#include "lockstep/error.h"
#include "lockstep/gradient/accumulated_batches.h"
#include "lockstep/gradient/local_gradients.h"
#include "lockstep/launch/own_progress.h"
#include "lockstep/memory.h"
#include "lockstep/model/parameters.h"
#include "lockstep/model/samples.h"
#include "lockstep/optimizer.h"
#include "lockstep/strategy/ddp/fitting.h"
#include "lockstep/strategy/ddp/gradient_exchange.h"
#include "lockstep/strategy/ddp/shard_exchange.h"
#include "lockstep/strategy/ddp/step_check.h"
#include "lockstep/strategy/ddp/virtual_shards.h"

namespace lockstep {
namespace {

std::vector<NamedTensor> trainable(std::vector<NamedTensor> parameters) {
  std::erase_if(parameters, [](const NamedTensor& parameter) { return !parameter.tensor.requires_grad(); });
  return parameters;
}

std::vector<NamedTensor> without(const std::set<std::string>& names, std::vector<NamedTensor> tensors) {
  std::erase_if(tensors, [&](const NamedTensor& tensor) { return names.contains(tensor.name); });
  return tensors;
}

std::vector<NamedTensor> held_by(const torch::optim::Optimizer& optimizer, std::vector<NamedTensor> tensors) {
  std::unordered_set<const void*> held;
  for (const torch::Tensor& parameter : parameters_of(optimizer)) held.insert(parameter.unsafeGetTensorImpl());
  std::erase_if(tensors, [&](const NamedTensor& t) { return !held.contains(t.tensor.unsafeGetTensorImpl()); });
  return tensors;
}

// Of options of the user's own that have none: 0.
double lr_of(const torch::optim::OptimizerParamGroup& group) try {
  return group.options().get_lr();
} catch (const c10::Error&) {
  return 0;
}

// Of the optimizers that are used most; of others 0.
double weight_decay_of(const torch::optim::OptimizerParamGroup& group) {
  const torch::optim::OptimizerOptions* const options = &group.options();
  if (const auto* const sgd = dynamic_cast<const torch::optim::SGDOptions*>(options)) return sgd->weight_decay();
  if (const auto* const adam = dynamic_cast<const torch::optim::AdamOptions*>(options)) return adam->weight_decay();
  if (const auto* const adamw = dynamic_cast<const torch::optim::AdamWOptions*>(options)) return adamw->weight_decay();
  return 0;
}

// What all ranks must have alike of an optimizer of torch's.
StepSettings settings_of(const torch::optim::Optimizer& optimizer) {
  StepSettings settings{{"the number of parameter groups", static_cast<double>(optimizer.param_groups().size())}};
  for (std::size_t i = 0; i < optimizer.param_groups().size(); ++i) {
    const auto& group = optimizer.param_groups()[i];
    settings.push_back({"lr", lr_of(group), static_cast<int>(i)});
    settings.push_back({"weight_decay", weight_decay_of(group), static_cast<int>(i)});
  }
  return settings;
}

// The optimizer that updates parameters which the ranks of a machine share; null: every rank has its own.
Optimizer* optimizer_of_shared_parameters(const World& world, torch::optim::Optimizer* optimizer,
                                          const DistributedDataParallelOptions& options) {
  return options.share_parameters && world.device().is_cpu() ? dynamic_cast<Optimizer*>(optimizer) : nullptr;
}

// Whether each rank updates a slice of the parameters: GPUs, for which nothing else was asked for.
bool can_slice(const World& world, const torch::optim::Optimizer* optimizer,
               const DistributedDataParallelOptions& options) {
  const auto* const own = dynamic_cast<const Optimizer*>(optimizer);
  return options.slice_update && own != nullptr && !own->layerwise() && !world.device().is_cpu() &&
         (world.size() > 1 || options.virtual_shards > 0) && !options.mean_in_grad && !options.hook &&
         options.algorithm == Algorithm::kDirect &&
         !options.gradient_as_bucket_view;  // with virtual shards also one rank, which adds up as several do
}

// A number that no other DistributedDataParallel of these ranks has. Each counts its own; the highest of all ranks grows
// with each one, whatever other ranks the members have worked with. Collective.
double agree_on_number(const World& world) {
  static std::atomic<std::int64_t> made{0};
  const torch::Tensor number = torch::full({1}, ++made, torch::kInt64).to(world.device());
  world.all_reduce(number, ReduceOp::kMax);
  return number.item<double>();
}

// What shows that parameters were written: how often, by their version counters; and a hash of some elements of each,
// because torch's optimizers write through data(), which counts nothing.
struct Values {
  std::int64_t writes = 0;
  std::uint64_t samples = 0;
  bool operator==(const Values&) const = default;
};

Values values_of(const std::vector<NamedTensor>& parameters) {
  Values values;
  for (const auto& [name, parameter] : parameters) {
    values.writes += parameter._version();
    values.samples = hash_of_samples(parameter, values.samples);
  }
  return values;
}

}  // namespace

class DistributedDataParallel::Impl {
 public:
  Impl(World world, torch::nn::Module& module, torch::optim::Optimizer* optimizer, const Options& options)
      : world_(std::move(world)), module_(&module), options_(options), check_(world_) {
    Optimizer* const sharing = optimizer_of_shared_parameters(world_, optimizer, options);
    require_known_names(module, options_.ignored);
    require_known_names(module, options_.sparse_parameters);
    require_shards_possible(world_, sharing != nullptr || can_slice(world_, optimizer, options_), options_);
    if (optimizer != nullptr) require_fitting(*optimizer, module, sharing != nullptr, options_.ignored);
    parameters_ = without(options.ignored, named_parameters(module));
    buffers_ = without(options.ignored, named_buffers(module));
    options_.sparse_parameters.merge(sparse_parameters(module));
    take_values_of_rank_0();
    number_ = agree_on_number(world_);
    if (!options.broadcast_buffers) buffers_.clear();
    frozen_ = parameters_;
    std::erase_if(frozen_, [](const NamedTensor& parameter) { return parameter.tensor.requires_grad(); });
    optimizer_ = optimizer;
    if (optimizer != nullptr) held_ = parameters_of(*optimizer).size();
    if (auto* const own = dynamic_cast<Optimizer*>(optimizer); own && options_.hook && options_.hook->keeps_residual())
      own->refuse_loss_scale();
    shard_buffers_ = ShardBuffers(buffers_, options.virtual_shards / world_.size());
    if (sharing != nullptr) share_parameters();
    exchange_ = make_exchange();
    name_modules(parameters_);
    note_values();
    note_steps();
    if (exchange_->source()) dynamic_cast<Optimizer&>(*optimizer).attach(exchange_->source());
    if (sharing == nullptr) return;
    give_back_freed_memory();  // where the parameters were before
  }

  // A training step is backward(), then the optimizer's step(). What it waits for, in order:
  //
  //   backward()  in shared memory: SharedGradients::finish, barrier 1: all ranks have published their gradients.
  //               through buckets: Reducer::finish: the all-reduce of every bucket and of the sample counts; sparse
  //               gradients are gathered row by row. The first exchange also waits in Reducer::begin, for the sample
  //               counts, and at its end for rank 0's order of the buckets.
  //               finish_exchange: rank 0's buffers, one broadcast for each dtype, if the module has buffers.
  //   step()      with shared parameters: begin_update(), barrier 2: all ranks are here, with the same settings. Then
  //               FlatUpdate, a barrier for the norms of clipping, loss scaling, LAMB and LARS;
  //               LAMB and LARS a second one for their trust ratios; then end_update(), barrier 3: all ranks have
  //               updated their slice. With separate parameters nothing.
  //
  // After a plain loss.backward() in shared memory, step() begins with the waits of backward().
  void backward(const torch::Tensor& loss, std::int64_t samples) {
    const double factor = begin_backward(samples, loss);
    if (samples > 0) run_begun_backward(loss, factor);
    end_backward();
  }

  double begin_backward(const BatchWeight& batch, const torch::Tensor& loss = {}) try {
    exchange_seconds_ = 0;
    begun_ = {batch.samples, !no_sync_};
    size_ += batch.size;
    if (no_sync_ && !block_) note_own_way(values_of(parameters_), /*accumulates=*/true);
    own_progress::begin_next_step();
    own_progress::enter(Phase::kBackward);
    backward_began_ = trace::now_if_recording();
    trace::count_memory();
    return exchange_->begin(batch, loss, begun_.exchanges);
  } catch (const std::exception& error) {
    fail(error);
    throw;
  }

  void end_backward() try {
    exchange_->end(begun_.exchanges);
    if (begun_.exchanges) finish_backward(begun_.samples);
    own_progress::enter(Phase::kOwnCode);
    trace::write(backward_began_, [] { return trace::Label{.name = "backward"}; });
  } catch (const std::exception& error) {
    fail(error);
    throw;
  }

  void cancel_backward(const std::string& reason) { exchange_->cancel("backward() failed: " + reason); }

  void write_parameters(const std::function<void()>& write) {
    {
      const ParameterWrite writing;
      const torch::NoGradGuard no_grad;
      write();
    }
    parameters_written();
  }

  void parameters_written() {
    if (block_) {
      memory_->barrier(signature_of(StepPhase::kParametersWritten, 0));
      block_->mark_written();
    }
    if (has_copies()) world_.barrier();
    note_values();
    unexchanged_.reset();
    goes_own_way_ = false;
  }

  // All ranks see in the same step that no rank has samples. A loop that begins with zero_grad() leaves gradients that a
  // step() has used.
  void join(torch::optim::Optimizer& optimizer) {
    if (begun_.exchanges) optimizer.zero_grad();
    while (true) {
      for (int shard = 0; shard < std::max(options_.virtual_shards / world_.size(), 1); ++shard) {
        begin_backward(BatchWeight::kNone);
        end_backward();
      }
      if (last_batch_.samples == 0) return exchange_->drop();
      optimizer.step();
      optimizer.zero_grad();
    }
  }

  Statistics statistics() const {
    Statistics statistics = statistics_;
    statistics.bytes = exchange_->bytes();
    statistics.exchange_seconds = exchange_->seconds();
    return statistics;
  }
  const World& world() const { return world_; }
  torch::nn::Module& module() const { return *module_; }
  bool& no_sync() { return no_sync_; }
  bool mean_in_grad() const { return exchange_->mean_in_grad(); }
  const BatchTotals& last_batch() const { return last_batch_; }
  double exchange_seconds() const { return exchange_seconds_; }

 private:
  void run_begun_backward(const torch::Tensor& loss, double factor) try {
    run_backward(loss, factor);
  } catch (const std::exception& error) {
    fail(error);
    throw;
  }

  void finish_backward(std::int64_t samples) {
    if (!shard_buffers_.finish_shard()) return;
    if (samples > 0 && !options_.find_unused_parameters) require_all_gradients();
    const trace::Span span("exchange");
    own_progress::enter(Phase::kExchange);
    const Stopwatch waiting;
    exchange_->finish();
    exchange_seconds_ = waiting.seconds();
    statistics_.waiting_seconds += exchange_seconds_;
    // Where ranks count alike, as if all had batches of the size of this one.
    const double size = std::exchange(size_, 0) * world_.size();
    own_progress::finish_step(std::isnan(size) ? last_batch_.samples : static_cast<std::int64_t>(size),
                              last_batch_.mean_loss);
  }

  // The other ranks need not wait for this one; a MismatchError they have, too.
  void fail(const std::exception& error) {
    if (dynamic_cast<const MismatchError*>(&error) == nullptr) cancel_backward(error.what());
  }

  // The models are compared first, so that nothing is sent that could hang or corrupt.
  void take_values_of_rank_0() const {
    const ParameterWrite write;  // they may be in the block of a DistributedDataParallel that was here before
    std::vector<NamedTensor> tensors = parameters_;
    tensors.insert(tensors.end(), buffers_.begin(), buffers_.end());
    for (const auto& [name, tensor] : tensors) require_device(tensor, world_.device(), name);
    require_same_model(world_, tensors);
    broadcast_tensors(world_, tensors);
  }

  void share_parameters() {
    memory_ = SharedMemory::of(world_);
    block_ = std::make_shared<ParameterBlock>(*memory_, parameters_);
  }

  // Ranks read each other's gradients where they can and nothing else was asked for.
  std::unique_ptr<GradientExchange> make_exchange() {
    const auto on_finished = [this](const BatchTotals& totals) { finish_exchange(totals); };
    if (memory_ && memory_->size() == world_.size() && !options_.mean_in_grad && !options_.hook &&
        options_.algorithm == Algorithm::kDirect)
      return exchange_in_shared_memory(memory_, trainable(parameters_),
                                       {.block = block_,
                                        .shards = options_.virtual_shards / world_.size(),
                                        .updated = held_by(*optimizer_, trainable(parameters_)),
                                        .on_finished = on_finished});
    const bool slices = can_slice(world_, optimizer_, options_) && holds_all_and_none_sparse();
    if (options_.virtual_shards > 0) return make_shards(slices, on_finished);
    const ReducerOptions options{.bucket_bytes = options_.bucket_bytes,
                                 .hook = options_.hook,
                                 .algorithm = options_.algorithm,
                                 .static_graph = options_.static_graph,
                                 .gradient_as_bucket_view = options_.gradient_as_bucket_view,
                                 .sparse = options_.sparse_parameters,
                                 .slices = slices,
                                 .settings = [this] { return settings(); }};
    if (!memory_)
      return exchange_through_buckets(std::make_unique<Reducer>(world_, trainable(parameters_), options, on_finished),
                                      nullptr);
    mean_ = std::make_shared<LocalGradients>(on_own_cores, memory_, block_);
    if (world_.size() > 1) mean_->require_exchanges();
    const auto on_mean = [this](const BatchTotals& totals) {
      finish_exchange(totals);
      mean_->remember_mean(parameters_);
    };
    return exchange_through_buckets(std::make_unique<Reducer>(world_, trainable(parameters_), options, on_mean), mean_);
  }

  std::unique_ptr<GradientExchange> make_shards(bool slices, std::function<void(const BatchTotals&)> on_finished) {
    if (!slices)
      throw UsageError(
          {.what = "virtual shards on GPUs, with parameters that have sparse gradients or that the optimizer does not "
                   "hold",
           .here = world_.describe(),
           .next = "train without virtual shards, or freeze what the optimizer does not hold"});
    return exchange_of_shards(world_, trainable(parameters_),
                              {.shards = options_.virtual_shards,
                               .bucket_bytes = options_.bucket_bytes,
                               .settings = [this] { return settings(); },
                               .on_finished = std::move(on_finished)});
  }

  bool holds_all_and_none_sparse() const {
    const auto trained = trainable(parameters_);
    return held_by(*optimizer_, trained).size() == trained.size() &&
           std::ranges::none_of(trained, [this](const auto& p) { return options_.sparse_parameters.contains(p.name); });
  }

  void require_all_gradients() const {
    std::vector<std::string> missing;
    for (const auto& [name, parameter] : trainable(parameters_))
      if (!parameter.grad().defined()) missing.push_back(name);
    if (missing.empty()) return;
    throw UsageError(
        {.what = concat("no gradient for ", lockstep::join(missing, ", ")),
         .here = world_.describe(),
         .likely = "these parameters take no part in the loss of this batch: a branch that was not taken, an output "
                   "that was not used, or detach()",
         .next = "use them, set requires_grad(false), or leave find_unused_parameters on"});
  }

  void require_none_unfrozen() const {
    for (const auto& [name, parameter] : frozen_)
      if (parameter.requires_grad())
        throw UsageError({.what = concat("parameter ", name, " requires a gradient, and did not when ",
                                         "DistributedDataParallel was made"),
                          .here = world_.describe(),
                          .likely = "a layer that is unfrozen during training: its gradient is not exchanged",
                          .next = "make the optimizer and DistributedDataParallel anew after requires_grad_(true)"});
  }

  // lockstep's own optimizers refuse a late group themselves.
  void require_none_added() const {
    if (optimizer_ == nullptr || dynamic_cast<const Optimizer*>(optimizer_) != nullptr) return;
    if (parameters_of(*optimizer_).size() == held_) return;
    std::unordered_set<const void*> known;
    for (const NamedTensor& parameter : parameters_) known.insert(parameter.tensor.unsafeGetTensorImpl());
    for (const torch::Tensor& parameter : parameters_of(*optimizer_))
      if (!known.contains(parameter.unsafeGetTensorImpl()))
        throw UsageError({.what = concat("the optimizer was given a parameter of shape ", parameter.sizes(),
                                         " that was not in the module when DistributedDataParallel was made"),
                          .here = world_.describe(),
                          .likely = "a layer that was added during training: its gradient is not exchanged",
                          .next = "add it first, then make DistributedDataParallel"});
  }

  // What every rank must have alike when gradients go through buckets.
  StepSettings settings() {
    StepSettings settings;
    if (const auto* own = dynamic_cast<const Optimizer*>(optimizer_)) {
      settings = own->settings();
      step_calls_in(settings) -= steps_;  // those since the last exchange
    } else if (optimizer_ != nullptr) {
      settings = settings_of(*optimizer_);
    }
    int number = 0;
    for (const NamedTensor& parameter : parameters_) add_frozen(settings, number++, !parameter.tensor.requires_grad());
    settings.push_back({"the number of the DistributedDataParallel", number_});
    const Values values = values_of(parameters_);
    settings.push_back(
        {"parameters written since the last exchange, in place,", static_cast<double>(values.writes - values_.writes)});
    settings.push_back(
        {"parameters written since the last exchange, by step() or otherwise,", values == values_ ? 0.0 : 1.0});
    if (mean_) settings.push_back({kMeanChanged, mean_->mean_was_changed() ? 1.0 : 0.0});
    note_own_way(values, /*accumulates=*/false);
    const bool compares = has_copies() && !goes_own_way_ && !(block_ && block_->written_by_hand());
    settings.push_back({kParameters, compares ? check_.hash_of_part(parameters_) : 0});
    return settings;
  }

  // Whether parameters of several ranks are at several places.
  bool has_copies() const { return !block_ || memory_->size() < world_.size(); }

  // Before each backward(). A rank that writes parameters between one in no_sync() and the exchange trains by itself, as local
  // SGD does, or looks ahead along its own gradient: from then on parameters may differ.
  void note_own_way(const Values& values, bool accumulates) {
    if (unexchanged_ && !(values == *unexchanged_)) goes_own_way_ = true;
    unexchanged_ = accumulates ? std::optional(values) : std::nullopt;
  }

  bool through_buckets() const { return !block_ || mean_; }

  // Only there: in shared memory a rank that writes alone is found in other ways.
  void note_values() {
    if (through_buckets()) values_ = values_of(parameters_);
  }

  void note_steps() {
    const auto* const own = dynamic_cast<const Optimizer*>(optimizer_);
    if (own == nullptr || !through_buckets()) return;
    StepSettings settings = own->settings();
    steps_ = step_calls_in(settings);
  }

  // At the end of each exchange, also of one that a plain loss.backward() has caused.
  void finish_exchange(const BatchTotals& totals) {
    require_none_unfrozen();
    require_none_added();
    if (block_) block_->require_in_place();  // what was written by hand has gone into these gradients
    check_.exchanged(parameters_);
    note_values();
    note_steps();
    last_batch_ = totals;
    ++statistics_.exchanges;
    broadcast_tensors(world_, buffers_);
    shard_buffers_.begin_step();
  }

  World world_;
  torch::nn::Module* module_;
  Options options_;
  StepCheck check_;
  std::vector<NamedTensor> parameters_;
  std::vector<NamedTensor> buffers_;
  std::vector<NamedTensor> frozen_;  // when this was made
  const torch::optim::Optimizer* optimizer_ = nullptr;
  std::size_t held_ = 0;                  // parameters of the optimizer, when this was made
  double number_ = 0;                     // tells it from others of the same ranks, when they exchange through buckets
  Values values_;                         // through buckets: of parameters_ after the last exchange
  std::optional<Values> unexchanged_;     // the same at the last backward() in no_sync() since then
  bool goes_own_way_ = false;             // parameters may differ between the ranks
  double steps_ = 0;                      // step() of lockstep's optimizer until then; kStepCalls
  std::shared_ptr<SharedMemory> memory_;  // with shared parameters
  std::shared_ptr<ParameterBlock> block_;
  std::shared_ptr<LocalGradients> mean_;  // with shared parameters through buckets: what the optimizer reads
  std::unique_ptr<GradientExchange> exchange_;
  struct {
    std::int64_t samples = 0;
    bool exchanges = true;
  } begun_;                          // by begin_backward()
  double size_ = 0;                  // of the batches since the last exchange; NaN: they count by samples
  std::int64_t backward_began_ = 0;  // for a trace
  ShardBuffers shard_buffers_;
  BatchTotals last_batch_;
  double exchange_seconds_ = 0;
  Statistics statistics_;  // exchanges and waiting_seconds; exchange_ counts the rest
  bool no_sync_ = false;
};

DistributedDataParallel::DistributedDataParallel(World world, torch::nn::Module& module, const Options& options)
    : impl_(std::make_unique<Impl>(std::move(world), module, nullptr, options)) {}

DistributedDataParallel::DistributedDataParallel(World world, torch::nn::Module& module,
                                                 torch::optim::Optimizer& optimizer, const Options& options)
    : impl_(std::make_unique<Impl>(std::move(world), module, &optimizer, options)) {}

DistributedDataParallel::~DistributedDataParallel() = default;

void DistributedDataParallel::backward(const torch::Tensor& loss, std::int64_t samples) {
  impl_->backward(loss, samples);
}
double DistributedDataParallel::begin_backward(const BatchWeight& batch) { return impl_->begin_backward(batch); }
void DistributedDataParallel::end_backward() { impl_->end_backward(); }
void DistributedDataParallel::cancel_backward(const std::string& reason) { impl_->cancel_backward(reason); }
DistributedDataParallel::NoSync DistributedDataParallel::no_sync() { return NoSync(&impl_->no_sync()); }
void DistributedDataParallel::join(torch::optim::Optimizer& optimizer) { impl_->join(optimizer); }
bool DistributedDataParallel::mean_in_grad() const { return impl_->mean_in_grad(); }
World DistributedDataParallel::world() const { return impl_->world(); }
torch::nn::Module& DistributedDataParallel::module() const { return impl_->module(); }
const BatchTotals& DistributedDataParallel::last_batch() const { return impl_->last_batch(); }
DistributedDataParallel::Statistics DistributedDataParallel::statistics() const { return impl_->statistics(); }
double DistributedDataParallel::exchange_seconds() const { return impl_->exchange_seconds(); }
void DistributedDataParallel::parameters_written() { impl_->parameters_written(); }
void DistributedDataParallel::write_parameters(const std::function<void()>& write) { impl_->write_parameters(write); }

}  // namespace lockstep
