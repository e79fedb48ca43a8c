// SPDX-License-Identifier: Apache-2.0
#include "lockstep/ddp.h"

#include <algorithm>
#include <cmath>
#include <optional>
#include <unordered_set>
#include <utility>

#include "lockstep/collective/operator_spans.h"
#include "lockstep/error.h"
#include "lockstep/memory.h"
#include "lockstep/model/parameters.h"
#include "lockstep/observe/phase_scope.h"
#include "lockstep/optimizer.h"
#include "lockstep/step/accumulated_batches.h"
#include "lockstep/step/exchange.h"
#include "lockstep/step/guards/guards.h"
#include "lockstep/step/layout.h"
#include "lockstep/task.h"

namespace lockstep {
namespace {

NamedTensors without(const std::set<std::string>& names, NamedTensors tensors) {
  std::erase_if(tensors, [&](const NamedTensor& tensor) { return names.contains(tensor.name); });
  return tensors;
}

NamedTensors held_by(const torch::optim::Optimizer& optimizer, NamedTensors tensors) {
  std::unordered_set<const void*> held;
  for (const Tensor& parameter : parameters_of(optimizer)) held.insert(parameter.unsafeGetTensorImpl());
  std::erase_if(tensors, [&](const NamedTensor& t) { return !held.contains(t.tensor.unsafeGetTensorImpl()); });
  return tensors;
}

// Adds the names of parameters that are found to have sparse gradients. Throws UsageError: a name that is not the module's.
DistributedDataParallelOptions options_for(const torch::nn::Module& module, DistributedDataParallelOptions options) {
  require_known_names(module, options.ignored);
  require_known_names(module, options.sparse_parameters);
  options.sparse_parameters.merge(sparse_parameters(module));
  return options;
}

StepLayout layout_of(const World& world, const torch::optim::Optimizer* optimizer, const NamedTensors& parameters,
                     const DistributedDataParallelOptions& options) {
  const auto* const fused = dynamic_cast<const Optimizer*>(optimizer);
  const auto trained = trainable(parameters);
  return choose_layout({.ranks = world.size(),
                        .ranks_on_machine = world.local_size(),
                        .fewest_ranks = fewest_ranks_of_launcher(),
                        .is_on_gpus = !world.device().is_cpu(),
                        .is_fused = fused != nullptr,
                        .is_layerwise = fused != nullptr && fused->layerwise(),
                        .updates_all = fused != nullptr && held_by(*fused, trained).size() == trained.size() &&
                                       without(options.sparse_parameters, trained).size() == trained.size(),
                        .here = world.describe()},
                       options);
}

// Keeps the module's buffers the same for any number of ranks, with virtual shards (docs/design/fused-step.md).
// A rank computes its shards one after another, each forward changing the buffers. What a shard computes must not
// depend on which rank computes it, so every shard's forward begins with the same buffers: those at the beginning of
// the step. After the last one the buffers are those that the rank's first shard left; rank 0's, which every rank gets,
// are those of shard 0 of the batch.
class ShardBuffers {
 public:
  ShardBuffers() = default;
  // shards: per rank and step; 0: a step is one backward(), and buffers are left alone.
  ShardBuffers(NamedTensors buffers, int shards) : buffers_(std::move(buffers)), shards_(shards) { begin_step(); }

  // After each backward(). Returns true if it was the last of the step.
  bool finish_shard() {
    if (shards_ == 0) return true;
    if (done_ == 0) after_first_ = copies();
    const bool is_last = ++done_ == shards_;
    const Tensors& values = is_last ? after_first_ : at_beginning_;
    const torch::NoGradGuard no_grad;
    for (size_t i = 0; i < buffers_.size(); ++i) buffers_[i].tensor.copy_(values[i]);
    if (is_last) done_ = 0;
    return is_last;
  }

  // The buffers as they are now are those that the next step begins with.
  void begin_step() {
    if (shards_ > 0) at_beginning_ = copies();
  }

 private:
  Tensors copies() const {
    Tensors copies;
    for (const auto& [name, tensor] : buffers_) copies.push_back(tensor.detach().clone());
    return copies;
  }

  NamedTensors buffers_;
  int shards_ = 0;
  int done_ = 0;  // shards of this step
  Tensors at_beginning_;
  Tensors after_first_;
};

}  // namespace

class DistributedDataParallel::Impl {
 public:
  Impl(World world, torch::nn::Module& module, torch::optim::Optimizer* optimizer, const Options& options)
      : world_(std::move(world)),
        module_(&module),
        options_(options_for(module, options)),
        shards_(options.virtual_shards / world_.size()),
        parameters_(without(options.ignored, named_parameters(module))),
        buffers_(without(options.ignored, named_buffers(module))),
        layout_(layout_of(world_, optimizer, parameters_, options_)),
        guards_(world_, parameters_, optimizer, layout_) {
    if (optimizer != nullptr) require_fitting(*optimizer, module, shares_parameters(layout_), options_.ignored);
    auto* const fused = dynamic_cast<Optimizer*>(optimizer);
    if (fused != nullptr && options_.hook && options_.hook->keeps_residual()) fused->refuse_loss_scale();
    leave_block(parameters_);  // of a DistributedDataParallel that had the module before
    take_values_of_rank_0();
    if (!options.broadcast_buffers) buffers_.clear();
    shard_buffers_ = ShardBuffers(buffers_, shards_);
    if (shares_parameters(layout_)) {
      memory_ = SharedMemory::of(world_);
      block_ = std::make_shared<ParameterBlock>(*memory_, parameters_);
    }
    exchange_ = make_exchange(optimizer);
    close_exchange_ = {nullptr, [exchange = exchange_, block = block_](void*) {
                         exchange->close();
                         if (block) block->leave();
                       }};
    name_modules(parameters_);
    guards_.begin(block_);
    if (layout_ != StepLayout::kOwnBuckets) fused->attach(exchange_);
    if (block_) give_back_freed_memory();  // where the parameters were before
  }

  // docs/design/fused-step.md lists the waits of a step. Through buckets the first one also waits in begin(), for the sample
  // counts, and at its end for rank 0's order of the buckets.
  void backward(const Tensor& loss, const BatchWeight& batch, double scale) {
    const double factor = begin_backward(batch, loss);
    try {
      if (batch.samples > 0) run_backward(loss, factor * scale);
    } catch (...) {
      fail();
    }
    end_backward();
  }

  double begin_backward(const BatchWeight& batch, const Tensor& loss = {}) try {
    begun_ = {batch.samples, !no_sync_};
    size_ += batch.size;
    if (no_sync_) guards_.before_accumulating();
    observe::begin_next_step();
    backward_phase_.emplace(Phase::kBackward);
    return exchange_->begin(batch, loss, begun_.exchanges);
  } catch (...) {
    fail();
  }

  void end_backward() try {
    exchange_->end(begun_.exchanges);
    if (begun_.exchanges && shard_buffers_.finish_shard()) exchange();  // true without virtual shards
    backward_phase_.reset();
  } catch (...) {
    fail();
  }

  void cancel_backward(const std::string& reason) { exchange_->cancel("backward() failed: " + reason); }

  void mean_gradients() try {
    const PhaseScope exchange(Phase::kExchange, "mean of gradients");
    exchange_->make_mean();
  } catch (...) {
    fail();
  }

  void write_parameters(const std::function<void()>& write) {
    if (is_writing_) return write();  // inside another one
    is_writing_ = true;
    const std::shared_ptr<void> ends(nullptr, [this](void*) { is_writing_ = false; });
    std::optional<ParameterBlock::Copies> copies;
    try {
      if (block_) copies.emplace(*block_);
      const torch::NoGradGuard no_grad;
      write();
      if (copies) copies->require_unseen();
    } catch (const MismatchError&) {  // the other ranks have it, too
      throw;
    } catch (const std::exception& error) {
      world_.abandon(concat("write_parameters() failed: ", error.what()));
      throw;
    }
    // Steps wait in this memory, too: a rank that is in one is named at once.
    if (layout_ == StepLayout::kPublished) memory_->barrier(signature_of(StepPhase::kParametersWritten, 0));
    guards_.require_same_values();
    if (copies) copies->publish();
    copies.reset();
    parameters_written();
  }

  void parameters_written() {
    if (block_) {
      memory_->barrier(signature_of(StepPhase::kParametersWritten, 0));
      block_->mark_written();
    }
    if (guards_.has_copies()) world_.barrier();
    guards_.parameters_written();
  }

  // All ranks see in the same step that no rank has samples. A loop that begins with zero_grad() leaves gradients that a
  // step() has used.
  void join(torch::optim::Optimizer& optimizer) {
    if (begun_.exchanges) optimizer.zero_grad();
    while (true) {
      for (int shard = 0; shard < std::max(shards_, 1); ++shard) {
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
  bool mean_in_grad() const { return layout_ == StepLayout::kSharedBuckets || layout_ == StepLayout::kOwnBuckets; }

 private:
  friend class DistributedDataParallel;

  void exchange() {
    if (begun_.samples > 0 && !options_.find_unused_parameters) guards_.require_all_gradients();
    backward_phase_.reset();
    {
      const PhaseScope exchange(Phase::kExchange, statistics_.waiting_seconds);
      exchange_->finish();
    }
    // Of ranks that tell the sizes of their batches, all count as if theirs had the size of this one.
    const double size = std::exchange(size_, 0) * world_.size();
    observe::finish_step(std::isnan(size) ? last_batch_.samples : static_cast<int64_t>(size), last_batch_.mean_loss);
  }

  // Runs at the end of each exchange, also of one that a plain loss.backward() has caused.
  void finish_exchange(const BatchTotals& totals) {
    guards_.after_exchange();
    last_batch_ = totals;
    ++statistics_.exchanges;
    broadcast_tensors(world_, buffers_);
    shard_buffers_.begin_step();
  }

  // Called while an exception is handled. The other ranks need not wait for this one; a MismatchError they have, too.
  [[noreturn]] void fail() try { throw; } catch (const MismatchError&) {
    throw;
  } catch (const std::exception& error) {
    cancel_backward(error.what());
    throw;
  }

  // The models are compared first, so that nothing is sent that could hang or corrupt.
  void take_values_of_rank_0() const {
    NamedTensors tensors = parameters_;
    tensors.insert(tensors.end(), buffers_.begin(), buffers_.end());
    for (const auto& [name, tensor] : tensors) require_device(tensor, world_.device(), name);
    require_same_model(world_, tensors);
    broadcast_tensors(world_, tensors);
  }

  std::shared_ptr<Exchange> make_exchange(const torch::optim::Optimizer* optimizer) {
    const auto on_finished = [this](const BatchTotals& totals) { finish_exchange(totals); };
    if (layout_ == StepLayout::kPublished)
      return publish_gradients(memory_, trainable(parameters_),
                               {.block = block_,
                                .shards = shards_,
                                .updated = held_by(*optimizer, trainable(parameters_)),
                                .on_finished = on_finished});
    return exchange_in_buckets(world_, parameters_, options_,
                               {.slices = layout_ == StepLayout::kSlices,
                                .memory = memory_,
                                .block = block_,
                                .settings = [this] { return guards_.settings(); },
                                .on_finished = on_finished});
  }

  World world_;
  torch::nn::Module* module_;
  Options options_;
  int shards_;  // of this rank; 0: none
  NamedTensors parameters_;
  NamedTensors buffers_;
  StepLayout layout_;
  Guards guards_;
  SharedMemoryPtr memory_;  // with shared parameters
  std::shared_ptr<ParameterBlock> block_;
  std::shared_ptr<Exchange> exchange_;
  std::shared_ptr<void>
      close_exchange_;  // the optimizer may keep exchange_: closes it, also where the constructor fails
  struct {
    int64_t samples = 0;
    bool exchanges = true;
  } begun_;                                   // by begin_backward()
  double size_ = 0;                           // of the batches since the last exchange; NaN: not all are known
  std::optional<PhaseScope> backward_phase_;  // from begin_backward() to the exchange
  ShardBuffers shard_buffers_;
  BatchTotals last_batch_;
  Statistics statistics_;  // exchanges and waiting_seconds; exchange_ counts the rest
  bool no_sync_ = false;
  bool is_writing_ = false;
};

DistributedDataParallel::DistributedDataParallel(World world, torch::nn::Module& module, const Options& options)
    : impl_(std::make_unique<Impl>(std::move(world), module, nullptr, options)) {}

DistributedDataParallel::DistributedDataParallel(World world, torch::nn::Module& module,
                                                 torch::optim::Optimizer& optimizer, const Options& options)
    : impl_(std::make_unique<Impl>(std::move(world), module, &optimizer, options)) {}

DistributedDataParallel::~DistributedDataParallel() = default;

void DistributedDataParallel::backward(const Tensor& loss, const BatchWeight& samples, double scale) {
  impl_->backward(loss, samples, scale);
}
double DistributedDataParallel::begin_backward(const BatchWeight& batch) { return impl_->begin_backward(batch); }
void DistributedDataParallel::end_backward() { impl_->end_backward(); }
void DistributedDataParallel::cancel_backward(const std::string& reason) { impl_->cancel_backward(reason); }
DistributedDataParallel::NoSync DistributedDataParallel::no_sync() { return NoSync(&impl_->no_sync_); }
void DistributedDataParallel::mean_gradients() { impl_->mean_gradients(); }
void DistributedDataParallel::join(torch::optim::Optimizer& optimizer) { impl_->join(optimizer); }
bool DistributedDataParallel::mean_in_grad() const { return impl_->mean_in_grad(); }
World DistributedDataParallel::world() const { return impl_->world_; }
torch::nn::Module& DistributedDataParallel::module() const { return *impl_->module_; }
const BatchTotals& DistributedDataParallel::last_batch() const { return impl_->last_batch_; }
DistributedDataParallel::Statistics DistributedDataParallel::statistics() const { return impl_->statistics(); }
void DistributedDataParallel::parameters_written() { impl_->parameters_written(); }
void DistributedDataParallel::write_parameters(const std::function<void()>& write) { impl_->write_parameters(write); }

}  // namespace lockstep
