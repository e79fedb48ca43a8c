// SPDX-License-Identifier: Apache-2.0
#include "lockstep/ddp.h"

#include <algorithm>
#include <optional>

#include "lockstep/base/text.h"
#include "lockstep/deadline.h"
#include "lockstep/error.h"
#include "lockstep/gradient/local_gradients.h"
#include "lockstep/gradient/reducer.h"
#include "lockstep/gradient/shared_gradients.h"
#include "lockstep/memory.h"
#include "lockstep/model/parameters.h"
#include "lockstep/optimizer.h"
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

std::vector<torch::Tensor> parameters_of(const torch::optim::Optimizer& optimizer) {
  std::vector<torch::Tensor> parameters;
  for (const auto& group : optimizer.param_groups())
    parameters.insert(parameters.end(), group.params().begin(), group.params().end());
  return parameters;
}

void require_known_names(const torch::nn::Module& module, const std::set<std::string>& names) {
  const auto known = module.named_parameters(), buffers = module.named_buffers();
  for (const std::string& name : names)
    if (!known.contains(name) && !buffers.contains(name))
      throw UsageError({.what = concat("the module has no parameter or buffer ", name),
                        .next = "give names as module.named_parameters() lists them"});
}

// The optimizer holds parameters of the module and, if it steps shared parameters, none that is ignored.
void require_fitting(const torch::optim::Optimizer& optimizer, const torch::nn::Module& module, bool shares,
                     const std::set<std::string>& ignored) {
  const auto own = named_parameters(module);
  for (const torch::Tensor& parameter : parameters_of(optimizer)) {
    const auto found = std::ranges::find_if(own, [&](const auto& mine) { return mine.tensor.is_same(parameter); });
    if (found == own.end())
      throw UsageError({.what = concat("the optimizer holds a tensor of shape ", parameter.sizes(),
                                       " that is not a parameter of the module"),
                        .likely = "an optimizer made before the module was replaced or its parameters were",
                        .next = "make the optimizer from module.parameters() after .to() and set_layout()"});
    if (shares && ignored.contains(found->name))
      throw UsageError(
          {.what = concat(found->name, " is ignored, but the optimizer that steps shared parameters holds it"),
           .next = "give it an optimizer of its own, or share_parameters = false"});
  }
}

// The optimizer that updates parameters which the ranks of a machine share; null: every rank has its own.
Optimizer* optimizer_of_shared_parameters(const World& world, torch::optim::Optimizer* optimizer,
                                          const DistributedDataParallelOptions& options) {
  return options.share_parameters && world.device().is_cpu() ? dynamic_cast<Optimizer*>(optimizer) : nullptr;
}

}  // namespace

class DistributedDataParallel::Impl {
 public:
  Impl(World world, torch::nn::Module& module, torch::optim::Optimizer* optimizer, const Options& options)
      : world_(std::move(world)), options_(options) {
    Optimizer* const sharing = optimizer_of_shared_parameters(world_, optimizer, options);
    require_known_names(module, options_.ignored);
    require_known_names(module, options_.sparse_parameters);
    require_shards_possible(world_, sharing != nullptr, options_);
    if (optimizer != nullptr) require_fitting(*optimizer, module, sharing != nullptr, options_.ignored);
    parameters_ = without(options.ignored, named_parameters(module));
    buffers_ = without(options.ignored, named_buffers(module));
    options_.sparse_parameters.merge(sparse_parameters(module));
    take_values_of_rank_0();
    if (!options.broadcast_buffers) buffers_.clear();
    shard_buffers_ = ShardBuffers(buffers_, options.virtual_shards / world_.size());
    if (sharing != nullptr) {
      memory_ = SharedMemory::of(world_);
      block_ = std::make_shared<ParameterBlock>(*memory_, parameters_);
    }
    make_exchange();
    if (sharing == nullptr) return;
    if (shared_)
      sharing->attach(shared_);
    else
      sharing->attach(std::make_shared<LocalGradients>(on_own_cores, memory_, block_));
    give_back_freed_memory();  // where the parameters were before
  }

  // A training step is backward(), then the optimizer's step(). What it waits for, in order:
  //
  //   backward()  in shared memory: SharedGradients::finish, barrier 1: all ranks have published their gradients.
  //               through buckets: Reducer::finish: the all-reduce of every bucket and of the sample counts; sparse
  //               gradients are gathered row by row. The first exchange also waits in Reducer::begin, for the sample
  //               counts, and at its end for rank 0's order of the buckets.
  //               finish_exchange: rank 0's buffers, one broadcast for each dtype, if the module has buffers.
  //   step()      with shared parameters: FlatUpdate, a barrier for the norms of clipping, loss scaling, LAMB and LARS;
  //               LAMB and LARS a second one for their trust ratios; then end_update(), barrier 2: all ranks have
  //               updated their slice. With separate parameters nothing.
  //
  // After a plain loss.backward() in shared memory, step() begins with the waits of backward().
  void backward(const torch::Tensor& loss, std::int64_t samples) try {
    exchange_seconds_ = 0;
    add_gradients(loss, samples);
    if (no_sync_ || !shard_buffers_.finish_shard()) return;
    if (samples > 0 && !options_.find_unused_parameters) require_all_gradients();
    const Stopwatch waiting;
    reducer_ ? reducer_->finish() : shared_->finish();
    exchange_seconds_ = waiting.seconds();
    statistics_.waiting_seconds += exchange_seconds_;
  } catch (const std::exception& error) {
    if (memory_) memory_->fail(concat("backward() failed: ", error.what()));  // the other ranks need not wait for us
    throw;
  }

  void parameters_written() {
    if (!block_) return;
    memory_->barrier();
    block_->mark_written();
  }

  // All ranks see in the same step that no rank has samples.
  void join(torch::optim::Optimizer& optimizer) {
    while (true) {
      backward({}, 0);
      if (last_batch_.samples == 0) return;
      optimizer.step();
      optimizer.zero_grad();
    }
  }

  Statistics statistics() const {
    Statistics statistics = statistics_;
    statistics.exchange_seconds = statistics.waiting_seconds;
    if (reducer_) {
      statistics.bytes = reducer_->statistics().bytes;
      statistics.exchange_seconds = reducer_->statistics().exchange_seconds;
    }
    return statistics;
  }
  bool& no_sync() { return no_sync_; }
  bool mean_in_grad() const { return reducer_.has_value(); }
  const BatchTotals& last_batch() const { return last_batch_; }
  double exchange_seconds() const { return exchange_seconds_; }

 private:
  // The models are compared first, so that nothing is sent that could hang or corrupt.
  void take_values_of_rank_0() const {
    std::vector<NamedTensor> tensors = parameters_;
    tensors.insert(tensors.end(), buffers_.begin(), buffers_.end());
    for (const auto& [name, tensor] : tensors) require_device(tensor, world_.device(), name);
    require_same_model(world_, tensors);
    broadcast_tensors(world_, tensors);
  }

  // The two ways of the gradients of a step from every rank's backward() to the optimizer:
  //
  //                  in shared memory                        through buckets
  //   where          all ranks on one machine, which         everywhere else; with a communication hook or an
  //                  share parameters                        algorithm by name
  //   backward()     autograd writes into shared memory      full buckets are all-reduced while it runs
  //   finish()       publishes places, one barrier           waits for the buckets
  //   .grad          this rank's own                         the mean
  //   step()         sums the gradients of all ranks         uses .grad
  void make_exchange() {
    const auto on_finished = [this](const BatchTotals& totals) { finish_exchange(totals); };
    if (memory_ && memory_->size() == world_.size() && !options_.mean_in_grad && !options_.hook &&
        options_.algorithm == Algorithm::kDirect) {
      shared_ = std::make_shared<SharedGradients>(
          memory_, trainable(parameters_),
          SharedGradientsOptions{
              .block = block_, .shards = options_.virtual_shards / world_.size(), .on_finished = on_finished});
      return;
    }
    reducer_.emplace(world_, trainable(parameters_),
                     ReducerOptions{.bucket_bytes = options_.bucket_bytes,
                                    .hook = options_.hook,
                                    .algorithm = options_.algorithm,
                                    .static_graph = options_.static_graph,
                                    .gradient_as_bucket_view = options_.gradient_as_bucket_view,
                                    .sparse = options_.sparse_parameters},
                     on_finished);
  }

  // Runs loss.backward(), which adds to .grad.
  void add_gradients(const torch::Tensor& loss, std::int64_t samples) {
    if (shared_) return shared_->backward(loss, samples);
    if (no_sync_) return reducer_->accumulate(samples, loss);
    const torch::Tensor start = reducer_->begin(samples, loss);
    if (samples > 0) loss.backward(start);
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

  // At the end of each exchange, also of one that a plain loss.backward() has caused.
  void finish_exchange(const BatchTotals& totals) {
    last_batch_ = totals;
    ++statistics_.exchanges;
    for (const auto& [name, parameter] : parameters_)
      if (shared_ && parameter.grad().defined()) statistics_.bytes += static_cast<std::int64_t>(parameter.nbytes());
    broadcast_tensors(world_, buffers_);
    shard_buffers_.begin_step();
  }

  World world_;
  Options options_;
  std::vector<NamedTensor> parameters_;
  std::vector<NamedTensor> buffers_;
  std::shared_ptr<SharedMemory> memory_;  // with shared parameters
  std::shared_ptr<ParameterBlock> block_;
  std::shared_ptr<SharedGradients> shared_;  // the optimizer holds it, too
  std::optional<Reducer> reducer_;           // instead of shared_
  ShardBuffers shard_buffers_;
  BatchTotals last_batch_;
  double exchange_seconds_ = 0;
  Statistics statistics_;  // with a reducer_, it counts the bytes and the seconds of the exchange
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
DistributedDataParallel::NoSync DistributedDataParallel::no_sync() { return NoSync(&impl_->no_sync()); }
void DistributedDataParallel::join(torch::optim::Optimizer& optimizer) { impl_->join(optimizer); }
bool DistributedDataParallel::mean_in_grad() const { return impl_->mean_in_grad(); }
const BatchTotals& DistributedDataParallel::last_batch() const { return impl_->last_batch(); }
DistributedDataParallel::Statistics DistributedDataParallel::statistics() const { return impl_->statistics(); }
double DistributedDataParallel::exchange_seconds() const { return impl_->exchange_seconds(); }
void DistributedDataParallel::parameters_written() { impl_->parameters_written(); }

}  // namespace lockstep
