// SPDX-License-Identifier: Apache-2.0
#include "lockstep/average_nets.h"

#include <algorithm>
#include <numeric>

#include "lockstep/base/cache_line.h"
#include "lockstep/base/require.h"
#include "lockstep/base/text.h"
#include "lockstep/strategy/averaging/flat_block.h"
#include "lockstep/strategy/devices/replica.h"

namespace lockstep {
namespace {

int64_t place_after(int64_t offset, const Tensor& parameter) {
  return round_up<int64_t>(offset + parameter.numel(), kCacheLine / parameter.element_size());
}

// The stride of a dimension of size 1 places nothing.
bool lie_alike(const Tensor& one, const Tensor& other) {
  if (one.sizes() != other.sizes()) return false;
  for (int64_t i = 0; i < one.dim(); ++i)
    if (one.size(i) != 1 && one.stride(i) != other.stride(i)) return false;
  return true;
}

}  // namespace

void refuse_16_bit_parameters(const NamedTensors& parameters) {
  for (const auto& [name, parameter] : parameters)
    require(parameter.element_size() != 2,
            concat("parameters of ", c10::toString(parameter.scalar_type()), " can't be averaged: ", name),
            "keep parameters in float32, and compute in 16 bits: --precision bfloat16");
}

Tensor make_flat_block(const NamedTensors& all, const World& world) {
  const torch::NoGradGuard no_grad;
  const NamedTensors parameters = trainable(all);
  require(!parameters.empty(), "a model without parameters to train", "leave requires_grad set on some");
  const torch::ScalarType dtype = parameters.front().tensor.scalar_type();
  refuse_16_bit_parameters(parameters);
  int64_t values = 0;
  for (const auto& [name, tensor] : parameters) {
    require(
        tensor.scalar_type() == dtype,
        concat(name, " is ", c10::toString(tensor.scalar_type()), ", but other parameters are ", c10::toString(dtype)),
        "give all parameters one dtype");
    static_cast<void>(dense_view(tensor));  // throws if it has gaps
    values = place_after(values, tensor);
  }
  const torch::Device device = parameters.front().tensor.device();
  const Tensor block = device.is_cpu() ? world.allocate({values}, dtype)
                                       : torch::empty({values}, torch::TensorOptions(dtype).device(device));
  block.zero_();
  int64_t offset = 0;
  for (auto [name, tensor] : parameters) {
    const Tensor place = block.as_strided(tensor.sizes(), tensor.strides(), offset);
    place.copy_(tensor);
    tensor.set_data(place);
    offset = place_after(offset, tensor);
  }
  return block;
}

Tensors make_flat_blocks(const std::vector<NamedTensors>& nets) {
  Tensors blocks;
  for (const NamedTensors& net : nets) {
    const auto are_alike = [](const auto& a, const auto& b) { return lie_alike(a.tensor, b.tensor); };
    require(std::ranges::equal(trainable(net), trainable(nets.front()), are_alike),
            "flat_blocks() of nets whose shapes or strides differ", "give all nets the same memory_format");
    blocks.push_back(make_flat_block(net, World::single()));
  }
  return blocks;
}

Tensors flat_blocks(const std::vector<ModulePtr>& nets) {
  std::vector<NamedTensors> parameters;
  for (const ModulePtr& net : nets) parameters.push_back(named_parameters(*net));
  return make_flat_blocks(parameters);
}

// Each device scales its block; then device d adds up part d of all blocks into block 0.
void mean_onto_first(Devices& devices, const Tensors& blocks, const std::vector<int64_t>& samples, int64_t all) {
  devices.run([blocks, samples, all](Device& device) {
    const torch::NoGradGuard no_grad;
    Tensor block = for_device(blocks, device);
    block.mul_(fraction(for_device(samples, device), all));
    device.reduce(block);
  });
}

void copy_from_first(Devices& devices, const Tensors& blocks) {
  if (blocks.size() > 1) devices.run([blocks](Device& device) { device.broadcast(for_device(blocks, device)); });
}

void average(Devices& devices, const Tensors& blocks, const std::vector<int64_t>& samples) {
  const std::vector<int64_t> counts = samples.empty() ? std::vector<int64_t>(blocks.size(), 1) : samples;
  const int64_t all = std::accumulate(counts.begin(), counts.end(), int64_t{0});
  require(
      std::ssize(blocks) == devices.size() && counts.size() == blocks.size(),
      concat("average() of ", blocks.size(), " nets with ", counts.size(), " weights on ", devices.size(), " devices"),
      "give one net and one weight for each device");
  require(all > 0 && std::ranges::min(counts) >= 0, "average() with weights that are negative or all 0",
          "give the samples of each net");
  mean_onto_first(devices, blocks, counts, all);
  copy_from_first(devices, blocks);
}

}  // namespace lockstep
