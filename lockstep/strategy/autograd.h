// SPDX-License-Identifier: Apache-2.0
// strategy/autograd.h: graphs that end at tensors, and autocast's setting of a thread.
//
// Threads: each thread has a setting of its own
#pragma once

#include <ATen/autocast_mode.h>

#include <map>
#include <utility>

#include "lockstep/task.h"

namespace lockstep {

// The same values without the graph that made them. They require gradients as before.
inline Tensors as_leaves(const Tensors& tensors) {
  Tensors leaves;
  for (const Tensor& each : tensors)
    leaves.push_back(each.defined() ? each.detach().requires_grad_(each.requires_grad()) : each);
  return leaves;
}

struct AutocastSetting {
  std::map<at::DeviceType, std::pair<bool, at::ScalarType>> of_device;  // whether it is on, and its dtype
  bool caches = true;

  static AutocastSetting now() {
    AutocastSetting setting{.of_device = {}, .caches = at::autocast::is_autocast_cache_enabled()};
    for (const auto device : {at::kCPU, at::kCUDA})
      setting.of_device[device] = {at::autocast::is_autocast_enabled(device), at::autocast::get_autocast_dtype(device)};
    return setting;
  }
  void set() const {
    for (const auto& [device, setting] : of_device) {
      at::autocast::set_autocast_enabled(device, setting.first);
      at::autocast::set_autocast_dtype(device, setting.second);
    }
    at::autocast::set_autocast_cache_enabled(caches);
  }
};

// Changes the calling thread's setting while it lives, as torch.autocast does in Python.
class AutocastGuard {
 public:
  explicit AutocastGuard(const AutocastSetting& setting) {
    at::autocast::increment_nesting();
    setting.set();
  }
  ~AutocastGuard() {
    before_.set();
    if (at::autocast::decrement_nesting() == 0)
      at::autocast::clear_cache();  // parameters change before the next forward
  }
  AutocastGuard& operator=(AutocastGuard&&) = delete;

 private:
  AutocastSetting before_ = AutocastSetting::now();
};

}  // namespace lockstep
