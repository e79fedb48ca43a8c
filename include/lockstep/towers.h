// SPDX-License-Identifier: Apache-2.0
// lockstep/towers.h: data parallel training on the devices of one process, in steps that a program calls one by one.
//
//   get_params -> a model on every device
//   each batch: split_and_load -> tower_losses -> backward -> all_reduce_gradients -> update; train_batch is all five
//
//   share_variables -> a model on every device, with the variables of the first
//   each batch: split_and_load -> tower_losses -> backward -> combine_gradients -> step() of the first one's optimizer
//
// examples/towers.cc and examples/shared_variables.cc are such programs; the strategy `towers` makes the same calls.
// The names are those of the multi-GPU chapter of Zhang et al., "Dive into Deep Learning", and of TensorFlow's
// multi-tower CIFAR-10 example.
//
// The gradient is the mean over all samples of the batch: the mean loss of a device with m of n samples has weight m/n.
//
// Flow:    Task + Batch -> here -> lockstep/devices.h, step/update/
// Owns:    nothing; copies of a Replica share its model and optimizer
// Threads: call from the thread that made the Devices; the work is done on the devices' threads
// Ranks:   inside one process
//
// Each call blocks until all devices are done, and throws what the task's functions throw, or PeerLost (Devices::run).
#pragma once

#include "lockstep/strategy.h"

namespace lockstep {

class LocalGradients;

// One device's copy of the model.
struct Replica {
  ModulePtr model;
  Layout layout = Layout::kContiguous;
  std::shared_ptr<Optimizer> optimizer;
  torch::Device device = torch::kCPU;
  std::shared_ptr<LocalGradients> combined{};  // where replicas share variables: the first one's optimizer reads them

  // batch: on any device.
  Tensor forward(const Task& task, const Batch& batch) const {
    Batch here = batch.to(device);
    here.data = in_layout(here.data, layout);
    return task.forward(*model, here);
  }
};
using Replicas = std::vector<Replica>;  // one per device

// A replica with an optimizer on every device, all with the parameters and buffers of the first. The same seed gives
// the same parameters. Throws UsageError: options that make no optimizer or layout.
Replicas get_params(const Devices& devices, const Task& task, const StrategyOptions& options = {});

// The same, with copies of the parameters and buffers of a model that exists, such as one that was trained before. It
// stays as it is. Throws UsageError: its parameters or buffers are not those of task.make_model().
Replicas get_params(const Devices& devices, const Task& task, const torch::nn::Module& model,
                    const StrategyOptions& options = {});

enum class Uneven {
  kSplit,  // sizes differ by at most one sample
  kRefuse  // an error
};

// A part of the batch for every device, in order, and on it; a part may be empty. Throws UsageError: Uneven::kRefuse,
// and the devices do not divide the batch.
std::vector<Batch> split_and_load(const Batch& batch, const Devices& devices, Uneven uneven = Uneven::kSplit);

// The same of one tensor, (B, ...).
Tensors split_and_load(const Tensor& data, const Devices& devices, Uneven uneven = Uneven::kSplit);

// Forward: a mean loss per device; undefined where a device has no samples that count. Clears the gradients of the last
// step, unless shards are a further part of the batch.
Tensors tower_losses(Devices& devices, const Task& task, const Replicas& replicas, const std::vector<Batch>& shards,
                     bool clears_gradients = true);

// Backward on each device, its loss weighted by its share of the samples, as the task counts them. samples: of all
// parts of the batch; 0: there is one part.
void backward(Devices& devices, const Task& task, const Tensors& losses, const std::vector<Batch>& shards,
              int64_t samples = 0);

// Sums each parameter's gradient over the devices, on every device. A missing gradient counts as zero; a parameter
// without a gradient on any device keeps none. Sets of cores copy nothing: each reads the others' memory.
void all_reduce_gradients(Devices& devices, const Replicas& replicas, Algorithm algorithm = Algorithm::kDirect);

// tensors[i] belongs to device i; afterwards each is the sum of all. Same shapes, strides and dtypes. Throws
// UsageError: not one tensor per device; DeviceError: one is elsewhere.
void all_reduce(Devices& devices, const Tensors& tensors, Algorithm algorithm = Algorithm::kDirect);

// The optimizer's step on every device.
void update(Devices& devices, const Replicas& replicas);

struct TrainBatchOptions {
  Uneven uneven = Uneven::kSplit;
  Algorithm algorithm = Algorithm::kDirect;  // of the gradients' all-reduce
};

// One step of training: all of the above, from split_and_load to update. Returns the samples and mean loss of the
// batch.
BatchTotals train_batch(Devices& devices, const Task& task, const Replicas& replicas, const Batch& batch,
                        const TrainBatchOptions& options = {});

// ---- Towers with shared variables

// As get_params(), but the variables exist once, on the CPU: every model uses the parameters of the first, and the
// first one's optimizer updates them, on the cores of all devices. `devices` must outlive it. Throws UsageError:
// devices that are GPUs (KVStore::create("local_update_cpu") has the variables on the CPU for those).
Replicas share_variables(Devices& devices, const Task& task, const StrategyOptions& options = {});

// The synchronisation point after backward(): the first one's optimizer takes the sum of all gradients in its next
// step(). Throws UsageError: replicas that share no variables.
void combine_gradients(const Replicas& replicas);

struct CombinedGradient {
  Tensor gradient, variable;  // of one shape
};

// Returns that sum for each variable that has a gradient on some device, in the order of the model. Costs a pass over the
// gradients. What only one device has is its .grad itself.
std::vector<CombinedGradient> combined_gradients(const Replicas& replicas);

}  // namespace lockstep
