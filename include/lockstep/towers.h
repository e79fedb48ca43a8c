// SPDX-License-Identifier: Apache-2.0
// lockstep/towers.h: data parallel training on the devices of one process, in steps that a program calls one by one.
//
//   get_params -> a model on every device
//   each batch: split_and_load -> tower_losses -> backward -> all_reduce_gradients -> update
//
// examples/towers.cc is such a program; the strategy `towers` makes the same calls. The functions and their names follow
// the multi-GPU chapter of Zhang et al., "Dive into Deep Learning".
//
// The gradient is the mean over all samples of the batch: the mean loss of a device with m of n samples has weight m/n.
//
// Flow:    Task + Batch -> here -> lockstep/devices.h, optimizer/
// Owns:    nothing; copies of a Replica share its model and optimizer
// Threads: call from the thread that made the Devices; the work is done on the devices' threads
// Ranks:   inside one process
//
// Each call blocks until all devices are done, and throws what the task's functions throw, or PeerLost (Devices::run).
#pragma once

#include <torch/types.h>

#include <memory>
#include <vector>

#include "lockstep/collective_types.h"
#include "lockstep/dataset.h"
#include "lockstep/devices.h"
#include "lockstep/layout.h"
#include "lockstep/optimizer.h"
#include "lockstep/strategy.h"
#include "lockstep/task.h"

namespace lockstep {

// One device's copy of the model.
struct Replica {
  ModulePtr model;
  Layout layout = Layout::kContiguous;
  std::shared_ptr<Optimizer> optimizer;
  torch::Device device = torch::kCPU;

  // data: on any device.
  torch::Tensor forward(const Task& task, const torch::Tensor& data) const {
    return task.forward(*model, in_layout(data.to(device), layout));
  }
};
using Replicas = std::vector<Replica>;  // one per device

// A replica with an optimizer on every device, all with the parameters and buffers of the first. The same seed gives
// the same parameters. Throws UsageError: options that make no optimizer or layout.
Replicas get_params(const Devices& devices, const Task& task, const StrategyOptions& options = {});

enum class Uneven {
  kSplit,  // sizes differ by at most one sample
  kRefuse  // an error
};

// A part of the batch for every device, in order, and on it; a part may be empty. Throws UsageError: Uneven::kRefuse,
// and the devices do not divide the batch.
std::vector<Batch> split_and_load(const Batch& batch, const Devices& devices, Uneven uneven = Uneven::kSplit);

// Forward: a mean loss per device; undefined where a device has no samples. Clears the gradients of the last step.
std::vector<torch::Tensor> tower_losses(Devices& devices, const Task& task, const Replicas& replicas,
                                        const std::vector<Batch>& shards);

// Backward on each device, its loss weighted by its share of the samples.
void backward(Devices& devices, const std::vector<torch::Tensor>& losses, const std::vector<Batch>& shards);

// Sums each parameter's gradient over the devices, on every device. A missing gradient counts as zero; a parameter
// without a gradient on any device keeps none. Sets of cores copy nothing: each reads the others' memory.
void all_reduce_gradients(Devices& devices, const Replicas& replicas, Algorithm algorithm = Algorithm::kDirect);

// The optimizer's step on every device.
void update(Devices& devices, const Replicas& replicas);

}  // namespace lockstep
