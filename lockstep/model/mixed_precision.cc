// SPDX-License-Identifier: Apache-2.0
#include "lockstep/model/mixed_precision.h"

#include <ATen/autocast_mode.h>

namespace lockstep {
namespace {

// Autocast on this thread, for the device of `data`, as torch.autocast does it in Python.
class Autocast {
 public:
  explicit Autocast(at::DeviceType device)
      : device_(device),
        enabled_(at::autocast::is_autocast_enabled(device)),
        dtype_(at::autocast::get_autocast_dtype(device)) {
    at::autocast::increment_nesting();
    at::autocast::set_autocast_enabled(device, true);
    at::autocast::set_autocast_dtype(device, at::kBFloat16);
  }
  ~Autocast() {
    at::autocast::set_autocast_enabled(device_, enabled_);
    at::autocast::set_autocast_dtype(device_, dtype_);
    if (at::autocast::decrement_nesting() == 0)
      at::autocast::clear_cache();  // parameters change before the next forward
  }
  Autocast(const Autocast&) = delete;
  Autocast& operator=(const Autocast&) = delete;

 private:
  at::DeviceType device_;
  bool enabled_;
  at::ScalarType dtype_;
};

}  // namespace

Task in_mixed_precision(Task task) {
  task.forward = [forward = task.forward](torch::nn::Module& model, const torch::Tensor& data) {
    const Autocast autocast(data.device().type());
    return forward(model, data).to(torch::kFloat32);
  };
  return task;
}

}  // namespace lockstep
