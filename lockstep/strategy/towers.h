// strategy/towers.h: data parallel training in four steps that can be called one by one. S0, and S3 with --update cpu.
//
//   get_params -> a model on every device
//   each batch: split_and_load -> tower_losses -> backward -> all_reduce_gradients -> update
//
// examples/towers.cc is such a program; the strategy `towers` makes the same calls.
//
// Flow:    Task + Batch -> here -> replica.h, devices.h, optimizer/
// Owns:    nothing
// Threads: one scheduling thread; the work is done by the devices'
// Ranks:   inside one process
//
// The gradient is the mean over all samples of the batch: a tower's mean loss over m_j of n samples counts m_j / n.
#pragma once

#include <memory>
#include <vector>

#include "lockstep/strategy/replica.h"

namespace lockstep {

// The parameters on every device, marked for gradients: a replica with an optimizer per device. S0.
Replicas get_params(const Devices& devices, const Task& task, const StrategyOptions& options = {});

enum class Uneven {
  kSplit,  // sizes differ by at most one
  kRefuse  // an error
};

// A part of the batch on every device, in order. Throws UsageError: Uneven::kRefuse and a remainder. S0.
std::vector<Batch> split_and_load(const Batch& batch, const Devices& devices, Uneven uneven = Uneven::kSplit);

// A mean loss per device, at the same time; undefined where a device has no samples. Gradients of the step before are
// forgotten. Throws what the task's functions throw; PeerLost.
std::vector<torch::Tensor> tower_losses(Devices& devices, const Task& task, const Replicas& replicas,
                                        const std::vector<Batch>& shards);

// Backward on each device, its loss weighted by its share of the samples.
void backward(Devices& devices, const std::vector<torch::Tensor>& losses, const std::vector<Batch>& shards);

// all_reduce_gradients(devices, replicas, algorithm) is in strategy/replica.h.

// The optimizer's step on every device. S0.
void update(Devices& devices, const Replicas& replicas);

std::unique_ptr<Strategy> make_towers(const World& world, const Task& task, const StrategyOptions& options);

}  // namespace lockstep
