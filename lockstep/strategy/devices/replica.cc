// SPDX-License-Identifier: Apache-2.0
#include "lockstep/strategy/devices/replica.h"

#include <algorithm>
#include <mutex>

#include "lockstep/base/text.h"
#include "lockstep/error.h"
#include "lockstep/model/parameters.h"
#include "lockstep/sampler.h"

namespace lockstep {
namespace {

// Ranks that are threads share torch's generator: held from the seed to the last parameter of a model.
std::mutex generator_in_use;

ModulePtr make_seeded_model(const Task& task, std::uint64_t seed) {
  const std::lock_guard lock(generator_in_use);
  torch::manual_seed(seed);
  return task.make_model();
}

void copy_values(const std::vector<NamedTensor>& from, const std::vector<NamedTensor>& into) {
  const torch::NoGradGuard no_grad;
  for (std::size_t i = 0; i < from.size(); ++i)
    if (!into[i].tensor.is_alias_of(from[i].tensor)) torch::Tensor(into[i].tensor).copy_(from[i].tensor);
}

void copy_model(const torch::nn::Module& from, const torch::nn::Module& into) {
  copy_values(named_parameters(from), named_parameters(into));
  copy_values(named_buffers(from), named_buffers(into));
}

void prepare_gradient(torch::Tensor& parameter) {
  if (!parameter.grad().defined())
    parameter.mutable_grad() = torch::zeros_like(parameter, parameter.options().requires_grad(false));
  else
    parameter.mutable_grad() = gradient_like(parameter);
}

// A parameter that has two names once, as in an optimizer.
ParameterLists parameters_of(const Replicas& replicas) {
  ParameterLists all;
  for (const Replica& replica : replicas) {
    all.emplace_back();
    for (const auto& [name, parameter] : named_parameters(*replica.model)) all.back().push_back(parameter);
  }
  return all;
}

std::int64_t bytes_of(const std::vector<NamedTensor>& tensors) {
  std::size_t bytes = 0;
  for (const auto& [name, tensor] : tensors) bytes += tensor.nbytes();
  return static_cast<std::int64_t>(bytes);
}

}  // namespace

UpdateOptions update_options(const StrategyOptions& options) {
  return {.optimizer = options.optimizer, .clipping = options.clipping, .ema_decay = options.ema_decay};
}

std::shared_ptr<Optimizer> make_optimizer(std::vector<torch::Tensor> parameters, const UpdateOptions& options) {
  auto optimizer = make_optimizer(std::move(parameters), options.optimizer);
  optimizer->set_clipping(options.clipping);
  if (options.ema_decay > 0) optimizer->keep_average(options.ema_decay);
  return optimizer;
}

Replica make_replica(const Task& task, const StrategyOptions& options, torch::Device device) {
  Replica replica{.model = make_seeded_model(task, options.seed)};
  replica.model->to(device);
  replica.layout = options.layout.value_or(preferred_layout(*replica.model, device));
  set_layout(*replica.model, replica.layout);
  replica.optimizer = make_optimizer(replica.model->parameters(), update_options(options));
  return replica;
}

Replicas make_replicas(int count, const Task& task, const StrategyOptions& options) {
  Replicas replicas;
  for (int i = 0; i < count; ++i) {
    replicas.push_back(make_replica(task, options));
    copy_model(*replicas.front().model, *replicas.back().model);
  }
  return replicas;
}

void seed_steps(std::uint64_t seed) {
  const std::lock_guard lock(generator_in_use);
  torch::manual_seed(seed);
}

ParameterLists with_gradients(const ParameterLists& all) {
  ParameterLists found(all.size());
  for (std::size_t i = 0; i < all[0].size(); ++i) {
    if (std::none_of(all.begin(), all.end(), [i](const auto& parameters) { return parameters[i].grad().defined(); }))
      continue;
    for (std::size_t replica = 0; replica < all.size(); ++replica) {
      torch::Tensor parameter = all[replica][i];
      prepare_gradient(parameter);
      found[replica].push_back(parameter);
    }
  }
  return found;
}

ParameterLists gradients_of(const ParameterLists& all) {
  ParameterLists gradients;
  for (const auto& parameters : all) {
    gradients.emplace_back();
    for (const torch::Tensor& parameter : parameters) gradients.back().push_back(parameter.grad());
  }
  return gradients;
}

ParameterLists with_gradients(const Replicas& replicas) { return with_gradients(parameters_of(replicas)); }
ParameterLists gradients_of(const Replicas& replicas) { return gradients_of(parameters_of(replicas)); }

std::shared_ptr<LocalGradients> share_parameters(Devices& devices, const Replicas& replicas) {
  const auto first = replicas.front().model->parameters();
  for (std::size_t r = 1; r < replicas.size(); ++r) {
    auto parameters = replicas[r].model->parameters();
    for (std::size_t i = 0; i < first.size(); ++i) parameters[i].set_data(first[i].detach());
  }
  auto gradients = std::make_shared<LocalGradients>(on_all(devices));
  replicas.front().optimizer->attach(gradients);
  return gradients;
}

void follow_model(const Replicas& replicas) {
  for (const Replica& replica : replicas) copy_model(*replicas.front().model, *replica.model);
}

void follow_first(const Replicas& replicas) {
  follow_model(replicas);
  const Replica& first = replicas.front();
  const auto parameters = first.model->parameters();
  for (std::size_t r = 1; r < replicas.size(); ++r) {
    const auto mine = replicas[r].model->parameters();
    for (std::size_t i = 0; i < mine.size(); ++i)
      replicas[r].optimizer->set_state(mine[i], first.optimizer->state_of(parameters[i]));
  }
}

void follow_learning_rate(const Replicas& replicas) {
  const double lr = replicas.front().optimizer->param_groups().front().options().get_lr();
  for (const Replica& replica : replicas) set_learning_rate(*replica.optimizer, lr);
}

void require_one_process(const World& world, const StrategyOptions& options) {
  if (world.size() == 1) return;
  throw UsageError({.what = concat("strategy ", strategy_info(options.kind).name,
                                   " has its devices in one process, but there are ", world.size(), " ranks"),
                    .next = "give --ranks without a launcher, or choose --strategy ddp or averaging"});
}

Batch part_of(const Batch& batch, int index, int parts) {
  const Range part = even_part(batch.size(), index, parts);
  return {batch.data.slice(0, part.begin, part.end), batch.target.slice(0, part.begin, part.end)};
}

std::vector<Batch> parts_of(const Batch& batch, int parts) {
  std::vector<Batch> all;
  for (int i = 0; i < parts; ++i) all.push_back(part_of(batch, i, parts));
  return all;
}

BatchTotals mean_of(const std::vector<torch::Tensor>& losses, const std::vector<Batch>& parts) {
  BatchTotals mean;
  for (std::size_t i = 0; i < losses.size(); ++i)
    if (losses[i].defined()) mean.add(parts[i].size(), losses[i].item<double>());
  return mean;
}

std::int64_t parameter_bytes(const torch::nn::Module& model) { return bytes_of(named_parameters(model)); }

std::int64_t gradient_bytes(const torch::nn::Module& model) {
  std::vector<NamedTensor> gradients;
  for (const auto& [name, parameter] : named_parameters(model))
    if (parameter.grad().defined()) gradients.push_back({name, parameter.grad()});
  return bytes_of(gradients);
}

std::int64_t optimizer_bytes(const Replica& replica) {
  std::vector<NamedTensor> state;
  for (const torch::Tensor& parameter : replica.model->parameters())
    for (const auto& [name, tensor] : replica.optimizer->state_of(parameter))
      if (tensor.dim() > 0) state.push_back({name, tensor});  // without the number of steps
  return bytes_of(state);
}

}  // namespace lockstep
