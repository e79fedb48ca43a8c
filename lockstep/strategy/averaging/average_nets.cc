// SPDX-License-Identifier: Apache-2.0
#include "lockstep/average_nets.h"

#include <algorithm>
#include <numeric>

#include "lockstep/base/text.h"
#include "lockstep/error.h"
#include "lockstep/strategy/averaging/flat_block.h"
#include "lockstep/strategy/devices/replica.h"

namespace lockstep {

std::vector<torch::Tensor> flat_blocks(const std::vector<ModulePtr>& nets) {
  std::vector<torch::Tensor> blocks;
  for (const ModulePtr& net : nets) blocks.push_back(make_flat_block(*net, World::single()));
  return blocks;
}

// Each device scales its block; then device d adds up part d of all blocks into block 0.
void mean_onto_first(Devices& devices, const std::vector<torch::Tensor>& blocks,
                     const std::vector<std::int64_t>& samples, std::int64_t all) {
  devices.run([blocks, samples, all](Device& device) {
    const torch::NoGradGuard no_grad;
    torch::Tensor block = for_device(blocks, device);
    block.mul_(static_cast<double>(for_device(samples, device)) / static_cast<double>(all));
    device.reduce(block);
  });
}

void copy_from_first(Devices& devices, const std::vector<torch::Tensor>& blocks) {
  if (blocks.size() > 1) devices.run([blocks](Device& device) { device.broadcast(for_device(blocks, device)); });
}

void average(Devices& devices, const std::vector<torch::Tensor>& blocks, const std::vector<std::int64_t>& samples) {
  const std::vector<std::int64_t> counts = samples.empty() ? std::vector<std::int64_t>(blocks.size(), 1) : samples;
  const std::int64_t all = std::accumulate(counts.begin(), counts.end(), std::int64_t{0});
  if (std::ssize(blocks) != devices.size() || counts.size() != blocks.size())
    throw UsageError({.what = concat("average() of ", blocks.size(), " nets with ", counts.size(), " weights on ",
                                     devices.size(), " devices"),
                      .next = "give one net and one weight for each device"});
  if (all <= 0 || std::ranges::min(counts) < 0)
    throw UsageError(
        {.what = "average() with weights that are negative or all 0", .next = "give the samples of each net"});
  mean_onto_first(devices, blocks, counts, all);
  copy_from_first(devices, blocks);
}

}  // namespace lockstep
