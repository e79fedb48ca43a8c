// strategy/kvstore/device_sum.h: level 1 of the store: what the devices of one worker push, added up. S2.
//
// Flow:    a list of values per device -> here -> one list -> the store, or its way to the servers
// Owns:    buffers for sums on the CPU
// Threads: the scheduling thread
// Ranks:   inside one process
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "lockstep/devices.h"
#include "lockstep/gradient/parallel_for.h"
#include "lockstep/optimizer/mean.h"

namespace lockstep {

// [device][key]; a key that is undefined on all devices has no value
using DeviceTensors = std::vector<std::vector<torch::Tensor>>;

enum class SumOn {
  kCpu,    // into memory of the store's own
  kDevice  // onto device 0
};

class DeviceSum {
 public:
  // `devices`: needed for kDevice; they add up and copy.
  DeviceSum(SumOn where, Devices* devices) : where_(where), devices_(devices) {}

  // Sums over devices, key by key, in the order of the devices; with one device its own tensors. `first` is the
  // number of the first key. Until the next sum of the same keys.
  std::vector<torch::Tensor> sum(const DeviceTensors& values, std::int64_t first);

  // Calls call(0) ... call(devices - 1), each on its device where there are threads for them.
  void on_every_device(std::size_t devices, const std::function<void(std::size_t)>& call);

  // Copies `from` to every device.
  void copy_to_all(const std::vector<torch::Tensor>& from, const DeviceTensors& to);

 private:
  std::vector<torch::Tensor> sum_on_cpu(const DeviceTensors& values, std::int64_t first);
  std::vector<torch::Tensor> sum_on_device(const DeviceTensors& values);

  SumOn where_;
  Devices* devices_;
  std::vector<torch::Tensor> buffers_;  // by number of the key
};

// into = sum of the terms' values, which are like `into`, dense, in one pass over memory.
void weighted_sum_into(const torch::Tensor& into, std::span<const Term> terms,
                       const ParallelFor& parallel_for = on_own_cores);

// The memory order of tensors of any layout; of an undefined one an undefined one.
std::vector<torch::Tensor> dense_views(const std::vector<torch::Tensor>& tensors);

}  // namespace lockstep
