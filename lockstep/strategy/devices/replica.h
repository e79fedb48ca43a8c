// SPDX-License-Identifier: Apache-2.0
// strategy/devices/replica.h: the copies of a model that the devices of one process train.
//
// Flow:    Task -> get_params() -> gradients on every device -> combined by the functions here -> step/update/
// Owns:    nothing
// Threads: as Devices: call from its scheduling thread
// Ranks:   inside one process
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "lockstep/base/to_size.h"
#include "lockstep/data/loader/device_copy.h"
#include "lockstep/kvstore.h"
#include "lockstep/step/local_gradients.h"
#include "lockstep/towers.h"

namespace lockstep {

// ---- Making replicas

// The optimizer that the options name, with clipping and average. Throws UsageError.
UpdateOptions update_options(const StrategyOptions& options);
std::shared_ptr<Optimizer> make_optimizer(Tensors parameters, const UpdateOptions& options);

// A model on `device` in the layout of options.layout, with its optimizer. The same seed gives the same parameters.
// Throws UsageError.
Replica make_replica(const Task& task, const StrategyOptions& options, torch::Device device = torch::kCPU);

// The places of options.devices.
std::vector<torch::Device> devices_of(const StrategyOptions& options);

// Ranks that are threads share torch's generator: held from its seed to the last parameter of a model.
std::unique_lock<std::mutex> hold_generator();

// Seeds torch's generator after the models have been made: the random numbers of the steps come from it, others on each rank.
void seed_steps(uint64_t seed, int rank = 0);

// Throws UsageError: Uneven::kRefuse, and the devices do not divide the batch.
void require_even(int64_t samples, const Devices& devices, Uneven uneven);

// Throws UsageError if `world` has several ranks.
void require_one_process(const World& world, const StrategyOptions& options);

// ---- Keeping them the same

// Makes all replicas use the memory of the first one's parameters: devices that are sets of cores gain nothing from
// copies. The first one's optimizer then updates for all, on the cores of all devices, with the sum of the gradients
// that combine_gradients() took before step(). `devices` must outlive the optimizer's last step.
void share_parameters(Devices& devices, Replicas& replicas);

// The same without an optimizer.
void share_memory(const Replicas& replicas);

// Copies parameters and buffers where the memory is not the same. Models of one structure. is_seen: by autograd, so
// that graphs of the old values can't be used any more.
void copy_model(const torch::nn::Module& from, const torch::nn::Module& into, bool is_seen = true);

// After a checkpoint was read into the first replica: copies its parameters and buffers, or these and the optimizer's
// state, to the others.
void follow_model(const Replicas& replicas);
void follow_first(const Replicas& replicas);

// ---- Gradients

// A parameter that has two names once, as in an optimizer.
DeviceTensors parameters_of(const Replicas& replicas);

// The parameter's gradient, which becomes dense and in the parameter's memory order; zeros where there was none.
Tensor dense_gradient(Tensor& parameter);

// The parameters that have a gradient on some replica. Afterwards they have one on all replicas, as dense_gradient()
// makes it, so that they agree element by element.
DeviceTensors with_gradients(const DeviceTensors& all);

// Undefined where there is none.
DeviceTensors gradients_of(const DeviceTensors& all);

// ---- Batches and losses

// How much a batch counts in a mean: by Task::samples, else its size. Throws UsageError: less than 0.
int64_t samples_of(const Task& task, const Batch& batch);

// A part for every device, on its way to it on a stream of its own. Does not block where the batch lies in pinned
// memory.
std::vector<CopiedBatch> start_parts(const Devices& devices, const Batch& batch);

// Returns parts that work may use which is queued from now on, on the GPUs' default streams.
std::vector<Batch> receive_parts(std::vector<CopiedBatch> parts);

// Throws DeviceError: one of the batch's tensors is elsewhere.
void require_device(const Batch& batch, torch::Device device);

// The batch for a loss on `device`; its data stays where it is.
Batch judged_on(torch::Device device, const Batch& batch);

// Part `index` of `parts`: contiguous in dimension 0, as even as possible, maybe empty; a view.
Tensor part_of(const Tensor& tensor, int index, int parts);
Batch part_of(const Batch& batch, int index, int parts);
std::vector<Batch> parts_of(const Batch& batch, int parts);

// The element for this device of a vector with one element per device.
template <class Vector>
decltype(auto) for_device(Vector& per_device, const Device& device) {
  return per_device[to_size(device.index())];
}

// Runs work on every device whose part is not empty, after it has cleared the gradients and begun a new sequence of
// random numbers. Returns what each device's work returned; undefined where a part is empty. Blocks. Throws as
// Devices::run does.
using ReplicaWork = std::function<Tensor(const Replica& replica, const Batch& part, const Device& device)>;
Tensors run_replicas(Devices& devices, const Replicas& replicas, const std::vector<Batch>& parts,
                     const ReplicaWork& work, bool clears_gradients = true);

// The defined outputs of all devices as one tensor on `device`, without their graphs.
Tensor gather(const Tensors& outputs, torch::Device device);

// gradient: of the gathered outputs; each device takes its part. Blocks.
void scatter_and_run_backward(Devices& devices, const Tensors& outputs, const Tensor& gradient);

// The totals of all parts. losses: undefined where a part counts 0.
BatchTotals mean_of(const Tensors& losses, const std::vector<Batch>& parts, const Task& task = {});

}  // namespace lockstep
