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
World synchronised(World world, const torch::nn::Module& module) {
  std::vector<NamedTensor> tensors = named_parameters(module);
  for (auto& buffer : named_buffers(module)) tensors.push_back(std::move(buffer));
  for (const auto& [name, tensor] : tensors) require_device(tensor, world.device(), name);
  require_same_model(world, tensors);
  broadcast_tensors(world, tensors);
  return world;
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

}  // namespace

DistributedDataParallel::DistributedDataParallel(World world, torch::nn::Module& module, const Options& options)
    : world_(synchronised(std::move(world), module)),
      parameters_(trainable(named_parameters(module))),
      buffers_(options.broadcast_buffers ? named_buffers(module) : std::vector<NamedTensor>{}),
      reducer_(world_, parameters_, {.bucket_bytes = options.bucket_bytes},
               [this](const BatchTotals& totals) { finish_backward(totals); }) {}

DistributedDataParallel::DistributedDataParallel(World world, torch::nn::Module& module,
                                                 const torch::optim::Optimizer& optimizer, const Options& options)
    : DistributedDataParallel(std::move(world), module, options) {
  require_own_parameters(module, optimizer);
}

void DistributedDataParallel::backward(const torch::Tensor& loss, std::int64_t samples) {
  reducer_.begin(samples, loss);
  if (samples > 0) loss.backward();
  const Stopwatch exchange;
  reducer_.finish();
  exchange_seconds_ = exchange.seconds();
}

void DistributedDataParallel::finish_backward(const BatchTotals& totals) {
  last_batch_ = totals;
  broadcast_tensors(world_, buffers_);
}

}  // namespace lockstep
