// SPDX-License-Identifier: Apache-2.0
#include "lockstep/train/snapshot.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>

#include <algorithm>
#include <cstring>
#include <iterator>

#include <nlohmann/json.hpp>

#include "lockstep/base/page_guard.h"
#include "lockstep/base/text.h"
#include "lockstep/error.h"
#include "lockstep/model/parameters.h"

namespace lockstep {

NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Position, epoch, step_in_epoch, step, samples, epoch_loss, epoch_samples,
                                   epoch_seconds)

namespace {

// Keys of the file's metadata.
constexpr const char* kPosition = "lockstep.position";
constexpr const char* kFingerprint = "lockstep.course";  // the name that checkpoints have had from the start

// What a rank draws from: the CPU's generator, and its GPU's where it has one.
std::vector<torch::Device> devices_with_generators(const World& world) {
  std::vector<torch::Device> devices{torch::kCPU};
  if (!world.device().is_cpu()) devices.push_back(world.device());
  return devices;
}

std::string generator_name(torch::Device device, int rank) {
  return concat("rng.", c10::DeviceTypeName(device.type(), /*lower_case=*/true), ".", rank);
}

torch::Tensor generator_state(torch::Device device) { return at::globalContext().defaultGenerator(device).get_state(); }

void set_generator_state(torch::Device device, const torch::Tensor& state) {
  at::Generator generator = at::globalContext().defaultGenerator(device);
  const std::lock_guard lock(generator.mutex());
  generator.set_state(state);
}

std::vector<NamedTensor> parameters_and_buffers(const torch::nn::Module& model) {
  std::vector<NamedTensor> tensors = named_parameters(model);
  std::ranges::move(named_buffers(model), std::back_inserter(tensors));
  return tensors;
}

// A value that is null on either side belongs to an option that the chosen optimizer does not have.
void require_same_fingerprint(const Json& saved, const Json& now) {
  for (const auto& [option, value] : saved.items()) {
    if (now.contains(option) && (now[option] == value || now[option].is_null() || value.is_null())) continue;
    throw CheckpointError({.what = concat("the checkpoint was made with ", option, " = ", value.dump(), ", now it is ",
                                          now.contains(option) ? now[option].dump() : "unknown"),
                           .likely = "--resume with other options than the run was started with",
                           .next = "give the same options, or start a new run in another --checkpoint-dir"});
  }
}

void copy_saved(const TensorFile& file, const std::string& name, const torch::Tensor& into) {
  const auto found = file.tensors.find(name);
  if (found == file.tensors.end() || found->second.sizes() != into.sizes() || found->second.dtype() != into.dtype())
    throw CheckpointError(
        {.what = concat("the checkpoint has no tensor ", name, " of ", into.dtype().name(), into.sizes()),
         .likely = "a checkpoint of another model",
         .next = "resume with the model that the run was started with"});
  into.copy_(found->second);
}

Optimizer::StateTensors saved_state(const TensorFile& file, const std::string& prefix) {
  Optimizer::StateTensors state;
  for (auto it = file.tensors.lower_bound(prefix); it != file.tensors.end() && it->first.starts_with(prefix); ++it)
    if (it->first.find('.', prefix.size()) == std::string::npos) state[it->first.substr(prefix.size())] = it->second;
  return state;
}

}  // namespace

std::string first_non_finite(const std::vector<NamedTensor>& tensors) {
  for (const auto& [name, tensor] : tensors)
    if (tensor.is_floating_point() && !torch::isfinite(tensor).all().item<bool>()) return name;
  return {};
}

TensorFile take_snapshot(const World& world, Strategy& strategy, const Position& position,
                         const TrainOptions& options) {
  strategy.synchronise();
  const std::string bad = first_non_finite(named_parameters(strategy.model()));
  if (!bad.empty())
    throw NonFiniteError({.what = concat("parameter ", bad, " is not finite after step ", position.step),
                          .likely = "a learning rate that is too high",
                          .next = "go on from the checkpoint before with a lower --lr"});
  TensorFile file;
  for (const torch::Device device : devices_with_generators(world)) {
    const torch::Tensor states = world.all_gather(generator_state(device));
    for (int rank = 0; rank < world.size(); ++rank) file.tensors[generator_name(device, rank)] = states[rank];
  }
  if (world.rank() != 0) return {};
  file.metadata = {{kPosition, nlohmann::json(position).dump()}, {kFingerprint, resume_fingerprint(options).dump()}};
  for (const auto& [name, tensor] : parameters_and_buffers(strategy.model())) file.tensors["model." + name] = tensor;
  for (const auto& [name, tensor] : named_parameters(strategy.model()))
    for (const auto& [key, state] : strategy.optimizer().state_of(tensor))
      file.tensors[concat("optimizer.", name, ".", key)] = state;
  for (const auto& [name, tensor] : strategy.state()) file.tensors["strategy." + name] = tensor;
  return file;
}

Position restore_snapshot(const TensorFile& file, const World& world, Strategy& strategy,
                          const TrainOptions& options) try {
  const torch::NoGradGuard no_grad;
  const ParameterWrite write;
  require_same_fingerprint(Json::parse(file.metadata.at(kFingerprint)), resume_fingerprint(options));
  for (const auto& [name, tensor] : parameters_and_buffers(strategy.model())) copy_saved(file, "model." + name, tensor);
  for (const auto& [name, tensor] : named_parameters(strategy.model()))
    strategy.optimizer().set_state(tensor, saved_state(file, concat("optimizer.", name, ".")));
  for (const auto& [name, tensor] : strategy.state()) copy_saved(file, "strategy." + name, tensor);
  const Position position = nlohmann::json::parse(file.metadata.at(kPosition));
  strategy.restored(position.step);
  for (const torch::Device device : devices_with_generators(world)) {
    const auto saved = file.tensors.find(generator_name(device, world.rank()));
    if (saved != file.tensors.end()) set_generator_state(device, saved->second);
  }
  return position;
} catch (const std::out_of_range&) {
  throw CheckpointError({.what = "the file is a safetensors file, but not a checkpoint of lockstep",
                         .next = "name the --checkpoint-dir of a run"});
}

std::string send_to_all(const World& world, const std::string& bytes) {
  const torch::Tensor size = torch::tensor({static_cast<std::int64_t>(bytes.size())});
  world.broadcast(size);
  if (size.item<std::int64_t>() == 0) return {};
  torch::Tensor buffer = torch::empty({size.item<std::int64_t>()}, torch::kUInt8);
  if (world.rank() == 0) std::memcpy(buffer.data_ptr(), bytes.data(), bytes.size());
  world.broadcast(buffer);
  return {static_cast<const char*>(buffer.const_data_ptr()), buffer.nbytes()};
}

}  // namespace lockstep
