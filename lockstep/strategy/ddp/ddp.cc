#include "lockstep/ddp.h"

#include <algorithm>

#include "lockstep/base/text.h"
#include "lockstep/deadline.h"
#include "lockstep/error.h"
#include "lockstep/memory.h"
#include "lockstep/model/parameters.h"

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

// Every tensor on rank 0's values; before that, nothing that could hang or corrupt is sent.
void synchronise(const World& world, std::vector<NamedTensor> tensors, const std::vector<NamedTensor>& more) {
  tensors.insert(tensors.end(), more.begin(), more.end());
  for (const auto& [name, tensor] : tensors) require_device(tensor, world.device(), name);
  require_same_model(world, tensors);
  broadcast_tensors(world, tensors);
}

void require_own_parameters(const torch::nn::Module& module, const torch::optim::Optimizer& optimizer) {
  const auto own = module.parameters();
  for (const auto& group : optimizer.param_groups())
    for (const torch::Tensor& parameter : group.params())
      if (std::none_of(own.begin(), own.end(), [&](const torch::Tensor& mine) { return mine.is_same(parameter); }))
        throw UsageError({.what = concat("the optimizer holds a tensor of shape ", parameter.sizes(),
                                         " that is not a parameter of the module"),
                          .likely = "an optimizer made before the module was replaced or its parameters were",
                          .next = "make the optimizer from module.parameters() after .to() and set_layout()"});
}

void require_known_names(const torch::nn::Module& module, const std::set<std::string>& names) {
  const auto known = module.named_parameters(), buffers = module.named_buffers();
  for (const std::string& name : names)
    if (!known.contains(name) && !buffers.contains(name))
      throw UsageError({.what = concat("the module has no parameter or buffer ", name),
                        .next = "give names as module.named_parameters() lists them"});
}

void require_not_ignored(const std::vector<NamedTensor>& all, const std::set<std::string>& ignored,
                         const torch::optim::Optimizer& optimizer) {
  for (const auto& group : optimizer.param_groups())
    for (const torch::Tensor& parameter : group.params())
      for (const auto& [name, tensor] : all)
        if (tensor.is_same(parameter) && ignored.contains(name))
          throw UsageError(
              {.what = concat(name, " is ignored, but the optimizer that steps shared parameters holds it"),
               .next = "give it an optimizer of its own, or share_parameters = false"});
}

std::vector<torch::Tensor> copies_of(const std::vector<NamedTensor>& tensors) {
  std::vector<torch::Tensor> copies;
  for (const auto& [name, tensor] : tensors) copies.push_back(tensor.detach().clone());
  return copies;
}

void set_values(const std::vector<NamedTensor>& tensors, const std::vector<torch::Tensor>& values) {
  const torch::NoGradGuard no_grad;
  for (std::size_t i = 0; i < tensors.size(); ++i) torch::Tensor(tensors[i].tensor).copy_(values[i]);
}

void require_shards_for(const World& world, const DistributedDataParallelOptions& options) {
  const int shards = options.virtual_shards;
  if (shards == 0) return;
  const auto refuse = [&](const std::string& why, const std::string& next) {
    throw UsageError({.what = concat(shards, " virtual shards on ", world.size(), " ranks: ", why),
                      .here = world.describe(),
                      .next = next});
  };
  if (shards < 0 || shards % world.size() != 0) refuse("the ranks do not divide them", "take a multiple of the ranks");
  if (options.algorithm != Algorithm::kDirect) refuse("an algorithm by name sums buckets", "one of the two");
  if (options.hook) refuse("a communication hook sums gradients its own way", "one of the two");
  if (!options.share_parameters) refuse("parameters are separate", "share_parameters = true, a lockstep optimizer");
  if (!world.device().is_cpu() || world.local_size() != world.size())
    refuse("not all ranks are on the cores of one machine", "train on one machine, or without virtual shards");
}

// Parameters in the block: before a step they have to be there, untouched; afterwards they are new.
class GradientsForBlock : public GradientSource {
 public:
  GradientsForBlock(std::shared_ptr<GradientSource> gradients, std::shared_ptr<ParameterBlock> block)
      : gradients_(std::move(gradients)), block_(std::move(block)) {}

  const std::shared_ptr<SharedMemory>& memory() const override { return gradients_->memory(); }

  StepGradients take(const std::vector<torch::Tensor>& parameters) override {
    block_->require_in_place();
    return gradients_->take(parameters);
  }

  void updated() override {
    gradients_->updated();
    block_->mark_written();
  }

 private:
  std::shared_ptr<GradientSource> gradients_;
  std::shared_ptr<ParameterBlock> block_;
};

}  // namespace

// Two ways to exchange: through a Reducer, which leaves the mean in .grad, or, where all ranks are on one machine and
// share parameters, by publishing gradients for the one pass of reduction and update in step().
class DistributedDataParallel::Impl {
 public:
  Impl(World world, torch::nn::Module& module, const Options& options)
      : world_(std::move(world)),
        options_(options),
        parameters_(without(options.ignored, named_parameters(module))),
        buffers_(without(options.ignored, named_buffers(module))) {
    require_known_names(module, options.ignored);
    require_known_names(module, options.sparse_parameters);
    options_.sparse_parameters.merge(sparse_parameters(module));
    synchronise(world_, parameters_, buffers_);
    if (!options.broadcast_buffers) buffers_.clear();
    if (options_.virtual_shards > 0) buffers_before_ = copies_of(buffers_);
  }

  void reduce_into_gradients() {
    reducer_.emplace(world_, trainable(parameters_),
                     ReducerOptions{.bucket_bytes = options_.bucket_bytes,
                                    .hook = options_.hook,
                                    .algorithm = options_.algorithm,
                                    .static_graph = options_.static_graph,
                                    .gradient_as_bucket_view = options_.gradient_as_bucket_view,
                                    .sparse = options_.sparse_parameters},
                     [this](const BatchTotals& totals) { finish_backward(totals); });
  }

  void share_parameters(Optimizer& optimizer) {
    memory_ = SharedMemory::of(world_);
    block_ = std::make_shared<ParameterBlock>(*memory_, parameters_);
    const bool as_they_lie = !options_.hook && options_.algorithm == Algorithm::kDirect;
    if (memory_->size() == world_.size() && as_they_lie)
      published_ = std::make_shared<PublishedGradients>(
          memory_, trainable(parameters_), [this](const BatchTotals& totals) { finish_backward(totals); },
          options_.virtual_shards / world_.size());
    else
      reduce_into_gradients();
    std::shared_ptr<GradientSource> source = published_;
    if (!source) source = std::make_shared<MeanGradients>(memory_);
    optimizer.attach(std::make_shared<GradientsForBlock>(std::move(source), block_));
    give_back_freed_memory();  // where the parameters were before
  }

  void backward(const torch::Tensor& loss, std::int64_t samples) try {
    compute_gradients(loss, samples);
    exchange_seconds_ = 0;
    if (no_sync_ || !finish_shard()) return;
    if (samples > 0 && !options_.find_unused_parameters) require_all_gradients();
    const Stopwatch exchange;
    if (published_)
      published_->finish();
    else
      reducer_->finish();
    exchange_seconds_ = exchange.seconds();
    statistics_.waiting_seconds += exchange_seconds_;
  } catch (const std::exception& error) {
    if (memory_) memory_->fail(concat("backward() failed: ", error.what()));
    throw;
  }

  void parameters_written() {
    if (!block_) return;
    memory_->barrier();
    block_->mark_written();
  }

  // Once nobody has samples, everybody sees it at the same time.
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
    statistics.bytes = reducer_ ? reducer_->statistics().bytes : published_bytes_;
    statistics.exchange_seconds = reducer_ ? reducer_->statistics().exchange_seconds : statistics_.waiting_seconds;
    return statistics;
  }
  bool& no_sync() { return no_sync_; }
  const BatchTotals& last_batch() const { return last_batch_; }
  double exchange_seconds() const { return exchange_seconds_; }

 private:
  // After each backward() of a step: true once it was the last. Each shard's forward begins with the same buffers,
  // and those of the first are kept.
  bool finish_shard() {
    if (options_.virtual_shards == 0) return true;
    const int shards = options_.virtual_shards / world_.size();
    if (shards_done_ == 0) first_shards_buffers_ = copies_of(buffers_);
    if (++shards_done_ < shards) {
      set_values(buffers_, buffers_before_);
      return false;
    }
    set_values(buffers_, first_shards_buffers_);
    shards_done_ = 0;
    return true;
  }

  void compute_gradients(const torch::Tensor& loss, std::int64_t samples) {
    if (published_) return published_->backward(loss, samples);
    if (no_sync_) return add_up_gradients(loss, samples);
    const torch::Tensor seed = reducer_->begin(samples, loss);
    if (samples > 0) loss.backward(seed);
  }

  void add_up_gradients(const torch::Tensor& loss, std::int64_t samples) {
    const torch::Tensor seed = reducer_->begin_without_exchange(samples, loss);
    try {
      if (samples > 0) loss.backward(seed);
    } catch (...) {
      reducer_->resume();
      throw;
    }
    reducer_->resume();
  }

  std::int64_t gradient_bytes() const {
    std::size_t bytes = 0;
    for (const auto& [name, parameter] : parameters_)
      if (parameter.grad().defined()) bytes += parameter.nbytes();
    return static_cast<std::int64_t>(bytes);
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

  void finish_backward(const BatchTotals& totals) {
    last_batch_ = totals;
    ++statistics_.exchanges;
    if (published_) published_bytes_ += gradient_bytes();
    broadcast_tensors(world_, buffers_);
    if (options_.virtual_shards > 0) buffers_before_ = copies_of(buffers_);
  }

  World world_;
  Options options_;
  std::vector<NamedTensor> parameters_;
  std::vector<NamedTensor> buffers_;
  std::optional<Reducer> reducer_;                 // one of these two
  std::shared_ptr<PublishedGradients> published_;  // the optimizer holds it too
  std::shared_ptr<SharedMemory> memory_;           // with the block: where parameters are shared
  std::shared_ptr<ParameterBlock> block_;
  BatchTotals last_batch_;
  double exchange_seconds_ = 0;
  Statistics statistics_;  // what is counted here
  std::int64_t published_bytes_ = 0;
  bool no_sync_ = false;
  int shards_done_ = 0;                        // of this step's virtual shards
  std::vector<torch::Tensor> buffers_before_;  // at the beginning of the step
  std::vector<torch::Tensor> first_shards_buffers_;
};

DistributedDataParallel::DistributedDataParallel(World world, torch::nn::Module& module, const Options& options)
    : impl_(std::make_unique<Impl>(std::move(world), module, options)) {
  impl_->reduce_into_gradients();
}

DistributedDataParallel::DistributedDataParallel(World world, torch::nn::Module& module,
                                                 const torch::optim::Optimizer& optimizer, const Options& options)
    : DistributedDataParallel(std::move(world), module, options) {
  require_own_parameters(module, optimizer);
}

DistributedDataParallel::DistributedDataParallel(World world, torch::nn::Module& module, Optimizer& optimizer,
                                                 const Options& options)
    : impl_(std::make_unique<Impl>(world, module, options)) {
  require_shards_for(world, options);
  require_own_parameters(module, optimizer);
  if (options.share_parameters && world.device().is_cpu()) {
    require_not_ignored(named_parameters(module), options.ignored, optimizer);
    impl_->share_parameters(optimizer);
  } else {
    impl_->reduce_into_gradients();
  }
}

DistributedDataParallel::~DistributedDataParallel() = default;

void DistributedDataParallel::backward(const torch::Tensor& loss, std::int64_t samples) {
  impl_->backward(loss, samples);
}
DistributedDataParallel::NoSync DistributedDataParallel::no_sync() { return NoSync(&impl_->no_sync()); }
void DistributedDataParallel::join(torch::optim::Optimizer& optimizer) { impl_->join(optimizer); }
const BatchTotals& DistributedDataParallel::last_batch() const { return impl_->last_batch(); }
DistributedDataParallel::Statistics DistributedDataParallel::statistics() const { return impl_->statistics(); }
double DistributedDataParallel::exchange_seconds() const { return impl_->exchange_seconds(); }
void DistributedDataParallel::parameters_written() { impl_->parameters_written(); }

}  // namespace lockstep
