// lockstep/towers.h: data parallel training in four steps that can be called one by one, over replicas on the devices of a process.
#pragma once

#include <memory>
#include <vector>

#include "lockstep/dataset.h"
#include "lockstep/devices.h"
#include "lockstep/strategy.h"

// ---- the copies of a model that the devices of one process train.
//
// Flow:    Task -> make_replicas -> gradients on every device -> combined by the functions here -> optimizer/
// Owns:    copies of a Replica share its model and optimizer
// Threads: as Devices: call from its scheduling thread
// Ranks:   inside one process

namespace lockstep {

class LocalGradients;

struct Replica {
  ModulePtr model;
  Layout layout = Layout::kContiguous;
  std::shared_ptr<Optimizer> optimizer;

  torch::Tensor forward(const Task& task, const torch::Tensor& data) const {
    return task.forward(*model, in_layout(data, layout));
  }
};
using Replicas = std::vector<Replica>;

// The optimizer that the options name. Throws UsageError.
std::shared_ptr<Optimizer> make_optimizer(std::vector<torch::Tensor> parameters, const StrategyOptions& options);

// A model on `device` in the layout of options.layout, the same for the same seed, with its optimizer. Throws
// UsageError.
Replica make_replica(const Task& task, const StrategyOptions& options, torch::Device device = torch::kCPU);

// One per device, all with the parameters and buffers of the first: S0's get_params.
Replicas make_replicas(int count, const Task& task, const StrategyOptions& options);

// What torch's own generator goes on with, once the models are made: the steps' seeds come from it.
void seed_steps(std::uint64_t seed);

// Every replica's values become those of the first, without a copy: their parameters are the same memory from then
// on. Where devices are sets of cores nothing is gained by copying to them. The first one's optimizer updates them on
// all devices, with the sum of the lists that the result was given before (gradients_of()).
[[nodiscard]] std::shared_ptr<LocalGradients> share_parameters(Devices& devices, const Replicas& replicas);

// After a checkpoint was put into the first replica: parameters and buffers of the others follow; and their optimizers.
void follow_model(const Replicas& replicas);
void follow_first(const Replicas& replicas);

// The learning rate of the first replica's optimizer, which is the one that schedules know, for all.
void follow_learning_rate(const Replicas& replicas);

// Sums over the replicas' gradients, parameter by parameter, on every device. A parameter without a gradient counts
// as zero there, and stays without one if no replica has one. S0's all_reduce; Sends nothing: every device reads what
// it needs where it lies.
void all_reduce_gradients(Devices& devices, const Replicas& replicas,
                          shm::Algorithm algorithm = shm::Algorithm::kDirect);

// Of lists of the same parameters, one per replica: those that have a gradient in some list. All of them have one
// afterwards, in the parameter's memory order, so that they agree element by element.
using ParameterLists = std::vector<std::vector<torch::Tensor>>;  // [replica][parameter]
ParameterLists with_gradients(const ParameterLists& all);

// Undefined where there is none.
ParameterLists gradients_of(const ParameterLists& all);
ParameterLists gradients_of(const Replicas& replicas);

// Bytes of a model's tensors.
std::int64_t parameter_bytes(const torch::nn::Module& model);
std::int64_t gradient_bytes(const torch::nn::Module& model);
std::int64_t optimizer_bytes(const Replica& replica);

// Devices that are threads belong to one process. Throws UsageError if `world` has several.
void require_one_process(const World& world, const StrategyOptions& options);

// The part of a global batch for each device, contiguous and as even as possible; views of the batch. Parts may be
// empty.
std::vector<Batch> parts_of(const Batch& batch, int devices);

}  // namespace lockstep

// ---- data parallel training in four steps that can be called one by one. S0, and S3 with --update cpu.
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

// all_reduce_gradients(devices, replicas, algorithm) is in lockstep/towers.h.

// The optimizer's step on every device. S0.
void update(Devices& devices, const Replicas& replicas);

std::unique_ptr<Strategy> make_towers(const World& world, const Task& task, const StrategyOptions& options);

}  // namespace lockstep
