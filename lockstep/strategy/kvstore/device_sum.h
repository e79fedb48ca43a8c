// SPDX-License-Identifier: Apache-2.0
// strategy/kvstore/device_sum.h: level 1 of a store: the sum over the devices of one worker.
//
// Flow:    a list of values per device -> here -> one list -> the store, or the servers
// Owns:    buffers for sums on the CPU
// Threads: the scheduling thread
// Ranks:   inside one process
#pragma once

#include <span>
#include <vector>

#include "lockstep/devices.h"
#include "lockstep/gradient/parallel_for.h"
#include "lockstep/kvstore.h"
#include "lockstep/optimizer/mean.h"

namespace lockstep {

enum class SumOn {
  kCpu,    // into the store's own memory
  kDevice  // onto device 0
};

class DeviceSum {
 public:
  // `devices`: they add up and copy. May be null for kCpu: then the calling thread and its cores do.
  DeviceSum(SumOn where, Devices* devices) : where_(where), devices_(devices) {}

  // Sums over devices, key by key, in the order of the devices; with one device its own tensors. first_key: number of
  // the first key. Valid until the next sum of the same keys. Blocks. Throws what Devices::run() throws.
  std::vector<torch::Tensor> sum(const DeviceTensors& values, std::size_t first_key);

  // Calls call(0) ... call(count - 1), each on its device where there are threads for them. Blocks until all are done.
  template <class Call>
  void on_every_device(std::size_t count, const Call& call) {
    if (devices_ == nullptr || count == 1)
      for (std::size_t device = 0; device < count; ++device) call(device);
    else
      devices_->run([call](Device& device) { call(device.index()); });
  }

 private:
  std::vector<torch::Tensor> sum_on_cpu(const DeviceTensors& values, std::size_t first_key);

  SumOn where_;
  Devices* devices_;
  std::vector<torch::Tensor> buffers_;  // [key]
};

// into = sum of the terms, in one pass over memory. `into`: dense; the terms have its dtype and number of elements.
void weighted_sum_into(const torch::Tensor& into, std::span<const Term> terms,
                       const ParallelFor& parallel_for = on_own_cores);

}  // namespace lockstep
