// SPDX-License-Identifier: Apache-2.0
#include "lockstep/strategy/devices/replica.h"

#include <algorithm>
#include <utility>
#include <variant>

#include "lockstep/base/require.h"
#include "lockstep/base/text.h"
#include "lockstep/collective/gpus.h"
#include "lockstep/collective/operator_spans.h"
#include "lockstep/data/loader/random.h"
#include "lockstep/error.h"
#include "lockstep/model/parameters.h"
#include "lockstep/sampler.h"
#include "lockstep/strategy/devices/thread_generator.h"

namespace lockstep {

DeviceTensors parameters_of(const Replicas& replicas) {
  DeviceTensors all;
  for (const Replica& replica : replicas) all.push_back(tensors_of(named_parameters(*replica.model)));
  return all;
}

void copy_model(const torch::nn::Module& from, const torch::nn::Module& into, bool is_seen) {
  const torch::NoGradGuard no_grad;
  const auto source = tensors_of(from), target = tensors_of(into);
  for (size_t i = 0; i < source.size(); ++i)
    if (!target[i].is_alias_of(source[i])) (is_seen ? target[i] : target[i].variable_data()).copy_(source[i]);
}

UpdateOptions update_options(const StrategyOptions& options) {
  return {.optimizer = options.optimizer, .clipping = options.clipping, .ema_decay = options.ema_decay};
}

std::shared_ptr<Optimizer> make_optimizer(Tensors parameters, const UpdateOptions& options) {
  auto optimizer = make_optimizer(std::move(parameters), options.optimizer);
  optimizer->set_clipping(options.clipping);
  if (options.ema_decay > 0) optimizer->keep_average(options.ema_decay);
  return optimizer;
}

namespace {

// With a second group for options.no_decay.
std::shared_ptr<Optimizer> make_optimizer_of(const torch::nn::Module& model, const StrategyOptions& options) {
  Tensors parameters = model.parameters(), spared;
  if (!options.no_decay.empty()) spared = norms_and_biases(model, options.no_decay);
  const auto is_spared = [&](const Tensor& parameter) {
    return std::ranges::any_of(spared, [&](const Tensor& each) { return each.is_same(parameter); });
  };
  const auto rest = std::ranges::stable_partition(parameters, std::not_fn(is_spared));
  spared.assign(rest.begin(), rest.end());
  parameters.erase(rest.begin(), rest.end());
  auto optimizer = make_optimizer(std::move(parameters), update_options(options));
  const auto add_spared = [&](auto values) {
    values.weight_decay = 0;
    optimizer->add_param_group(parameter_group(spared, values));
  };
  if (!spared.empty()) std::visit(add_spared, options.optimizer);
  return optimizer;
}

}  // namespace

Replica make_replica(const Task& task, const StrategyOptions& options, torch::Device device) {
  return on_device(device, [&] {
    Replica replica{.device = device};
    {
      const auto generator = hold_generator();
      torch::manual_seed(options.seed);
      replica.model = task.make_model();
    }
    replica.model->to(device);
    replica.layout = options.layout.value_or(preferred_layout(*replica.model, device));
    set_layout(*replica.model, replica.layout);
    replica.optimizer = make_optimizer_of(*replica.model, options);
    name_modules(named_parameters(*replica.model));
    return replica;
  });
}

std::vector<torch::Device> devices_of(const StrategyOptions& options) {
  std::vector<torch::Device> where;
  for (const DevicePlace& place : options.places) where.push_back(place.device);
  if (where.empty()) where.resize(to_size(std::max(options.devices, 0)), torch::kCPU);
  return where;
}

std::unique_lock<std::mutex> hold_generator() {
  static std::mutex in_use;
  return std::unique_lock(in_use);
}

void seed_steps(uint64_t seed, int rank) {
  const auto generator = hold_generator();
  torch::manual_seed(seed + static_cast<uint64_t>(rank) + 1);
}

Tensor dense_gradient(Tensor& parameter) {
  parameter.mutable_grad() = parameter.grad().defined()
                                 ? gradient_like(parameter)
                                 : torch::zeros_like(parameter, parameter.options().requires_grad(false));
  return parameter.grad();
}

DeviceTensors with_gradients(const DeviceTensors& all) {
  DeviceTensors found(all.size());
  for (size_t i = 0; i < all[0].size(); ++i) {
    if (std::ranges::none_of(all, [i](const auto& parameters) { return parameters[i].grad().defined(); })) continue;
    for (size_t replica = 0; replica < all.size(); ++replica) {
      Tensor parameter = all[replica][i];
      dense_gradient(parameter);
      found[replica].push_back(parameter);
    }
  }
  return found;
}

DeviceTensors gradients_of(const DeviceTensors& all) {
  DeviceTensors gradients;
  for (const auto& parameters : all) {
    gradients.emplace_back();
    for (const Tensor& parameter : parameters) gradients.back().push_back(parameter.grad());
  }
  return gradients;
}

void share_memory(const Replicas& replicas) {
  const auto first = replicas.front().model->parameters();
  for (size_t r = 1; r < replicas.size(); ++r) {
    auto parameters = replicas[r].model->parameters();
    for (size_t i = 0; i < first.size(); ++i) parameters[i].set_data(first[i].detach());
  }
}

void share_parameters(Devices& devices, Replicas& replicas) {
  require(replicas.front().optimizer->param_groups().size() == 1,  // LocalGradients has the model's order
          "shared variables with no_decay", "give every device its own: get_params()");
  share_memory(replicas);
  replicas.front().combined = std::make_shared<LocalGradients>(on_all(devices));
  replicas.front().optimizer->attach(replicas.front().combined);
}

void follow_model(const Replicas& replicas) {
  for (const Replica& replica : replicas) copy_model(*replicas.front().model, *replica.model);
}

void follow_first(const Replicas& replicas) {
  follow_model(replicas);
  const Replica& first = replicas.front();
  const auto parameters = first.model->parameters();
  for (size_t r = 1; r < replicas.size(); ++r) {
    const auto mine = replicas[r].model->parameters();
    for (size_t i = 0; i < mine.size(); ++i)
      replicas[r].optimizer->set_state(mine[i], first.optimizer->state_of(parameters[i]));
  }
}

void require_one_process(const World& world, const StrategyOptions& options) {
  require(world.size() == 1,
          concat("strategy ", strategy_info(options.kind).name, " has its devices in one process, but there are ",
                 world.size(), " ranks"),
          "give --ranks without a launcher, or choose --strategy ddp or averaging");
}

int64_t samples_of(const Task& task, const Batch& batch) {
  if (batch.size() == 0 || !task.samples) return batch.size();
  const int64_t samples = task.samples(batch);
  if (samples < 0)
    throw UsageError(
        {.what = concat("Task::samples of ", task.name, " counts ", samples, " in a batch of ", batch.size()),
         .next = "return at least 0, such as mask.sum().item<int64_t>()"});
  return samples;
}

void require_device(const Batch& batch, torch::Device device) {
  if (batch.data.defined()) require_device(batch.data, device, "the batch");
  if (batch.target.defined()) require_device(batch.target, device, "the target");
  for (const auto& [name, tensor] : batch.more) require_device(tensor, device, name);
}

Batch judged_on(torch::Device device, const Batch& batch) {
  Batch judged = Batch{{}, batch.target, batch.more}.to(device);
  judged.data = batch.data;
  return judged;
}

Tensor part_of(const Tensor& tensor, int index, int parts) {
  const Range part = even_part(tensor.size(0), index, parts);
  return tensor.slice(0, part.begin, part.end);
}

Batch part_of(const Batch& batch, int index, int parts) {
  const Range part = even_part(batch.size(), index, parts);
  return batch.rows(part.begin, part.end);
}

std::vector<Batch> parts_of(const Batch& batch, int parts) {
  std::vector<Batch> all;
  for (int i = 0; i < parts; ++i) all.push_back(part_of(batch, i, parts));
  return all;
}

std::vector<CopiedBatch> start_parts(const Devices& devices, const Batch& batch) {
  std::vector<CopiedBatch> parts;
  for (int i = 0; i < devices.size(); ++i) {
    Batch part = part_of(batch, i, devices.size());
    if (!devices.on_gpus()) part = part.to(torch::kCPU);
    const torch::Device where = devices.where(i);
    parts.push_back(start_copy(std::move(part), copy_stream(where)));
  }
  return parts;
}

std::vector<Batch> receive_parts(std::vector<CopiedBatch> parts) {
  std::vector<Batch> received;
  for (CopiedBatch& part : parts) received.push_back(receive(std::move(part)));
  return received;
}

Tensors run_replicas(Devices& devices, const Replicas& replicas, const std::vector<Batch>& parts,
                     const ReplicaWork& work, bool clears_gradients) {
  const auto results = std::make_shared<Tensors>(parts.size());
  devices.run([=, seed = draw_seed()](Device& device) {
    const Replica& replica = for_device(replicas, device);
    const Batch& part = for_device(parts, device);
    if (clears_gradients) replica.optimizer->zero_grad();
    if (part.size() == 0) return;
    device.seed(mix_seed(seed, device.index()));
    for_device(*results, device) = work(replica, part, device);
  });
  return *results;
}

Tensor gather(const Tensors& outputs, torch::Device device) {
  Tensors defined;
  for (const Tensor& output : outputs)
    if (output.defined()) defined.push_back(output.detach().to(device));
  return torch::cat(defined);
}

void scatter_and_run_backward(Devices& devices, const Tensors& outputs, const Tensor& gradient) {
  devices.run([outputs, gradient, parts = devices.size()](Device& device) {
    const Tensor& output = for_device(outputs, device);
    if (output.defined()) output.backward(part_of(gradient, device.index(), parts).to(device.where()));
  });
}

BatchTotals mean_of(const Tensors& losses, const std::vector<Batch>& parts, const Task& task) {
  BatchTotals mean;
  for (size_t i = 0; i < losses.size(); ++i) {
    mean.examples += parts[i].size();
    if (losses[i].defined())
      on_device(losses[i].device(), [&] { mean.add(samples_of(task, parts[i]), losses[i].item<double>()); });
  }
  return mean;
}

}  // namespace lockstep
