#include "lockstep/strategy/ddp.h"

#include <algorithm>

#include "lockstep/base/deadline.h"
#include "lockstep/base/error.h"
#include "lockstep/base/text.h"

namespace lockstep {
namespace {

std::vector<NamedTensor> trainable(std::vector<NamedTensor> parameters) {
  std::erase_if(parameters, [](const NamedTensor& parameter) { return !parameter.tensor.requires_grad(); });
  return parameters;
}

// Every parameter and buffer on rank 0's values; before that, nothing that could hang or corrupt is sent.
void synchronise(const World& world, const torch::nn::Module& module) {
  std::vector<NamedTensor> tensors = named_parameters(module);
  for (auto& buffer : named_buffers(module)) tensors.push_back(std::move(buffer));
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

// Two ways to exchange: through a Reducer, which leaves the mean in .grad, or, where all ranks are on one machine and share
// parameters, by publishing gradients for the one pass of reduction and update in step().
class DistributedDataParallel::Impl {
 public:
  Impl(World world, torch::nn::Module& module, const Options& options)
      : world_(std::move(world)),
        options_(options),
        parameters_(named_parameters(module)),
        buffers_(options.broadcast_buffers ? named_buffers(module) : std::vector<NamedTensor>{}) {
    synchronise(world_, module);
  }

  void reduce_into_gradients() {
    reducer_.emplace(world_, trainable(parameters_), ReducerOptions{.bucket_bytes = options_.bucket_bytes},
                     [this](const BatchTotals& totals) { finish_backward(totals); });
  }

  void share_parameters(Optimizer& optimizer) {
    memory_ = SharedMemory::of(world_);
    block_ = std::make_shared<ParameterBlock>(*memory_, parameters_);
    if (memory_->size() == world_.size())
      published_ = std::make_shared<PublishedGradients>(memory_, trainable(parameters_),
                                                        [this](const BatchTotals& totals) { finish_backward(totals); });
    else
      reduce_into_gradients();
    std::shared_ptr<GradientSource> source = published_;
    if (!source) source = std::make_shared<MeanGradients>(memory_);
    optimizer.attach(std::make_shared<GradientsForBlock>(std::move(source), block_));
  }

  void backward(const torch::Tensor& loss, std::int64_t samples) try {
    compute_gradients(loss, samples);
    const Stopwatch exchange;
    if (published_)
      published_->finish();
    else
      reducer_->finish();
    exchange_seconds_ = exchange.seconds();
  } catch (const std::exception& error) {
    if (memory_) memory_->fail(concat("backward() failed: ", error.what()));
    throw;
  }

  void parameters_written() {
    if (!block_) return;
    memory_->barrier();
    block_->mark_written();
  }

  const BatchTotals& last_batch() const { return last_batch_; }
  double exchange_seconds() const { return exchange_seconds_; }

 private:
  void compute_gradients(const torch::Tensor& loss, std::int64_t samples) {
    if (published_) return published_->backward(loss, samples);
    reducer_->begin(samples, loss);
    if (samples > 0) loss.backward();
  }

  void finish_backward(const BatchTotals& totals) {
    last_batch_ = totals;
    broadcast_tensors(world_, buffers_);
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
  require_own_parameters(module, optimizer);
  if (options.share_parameters && world.device().is_cpu())
    impl_->share_parameters(optimizer);
  else
    impl_->reduce_into_gradients();
}

DistributedDataParallel::~DistributedDataParallel() = default;

void DistributedDataParallel::backward(const torch::Tensor& loss, std::int64_t samples) {
  impl_->backward(loss, samples);
}
const BatchTotals& DistributedDataParallel::last_batch() const { return impl_->last_batch(); }
double DistributedDataParallel::exchange_seconds() const { return impl_->exchange_seconds(); }
void DistributedDataParallel::parameters_written() { impl_->parameters_written(); }

}  // namespace lockstep
