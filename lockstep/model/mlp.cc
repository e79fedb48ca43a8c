// SPDX-License-Identifier: Apache-2.0
#include "lockstep/models.h"

namespace lockstep {

MLPImpl::MLPImpl(const MLPOptions& options) {
  torch::nn::Sequential layers;
  std::vector<int64_t> widths = options.hidden;
  widths.push_back(options.outputs);
  int64_t inputs = options.inputs;
  for (size_t i = 0; i < widths.size(); ++i) {
    const auto linear = std::make_shared<torch::nn::LinearImpl>(inputs, widths[i]);
    layers->push_back(linear);
    inputs = widths[i];
    add_piece("layers." + std::to_string(i), {linear.get()}, [linear, i, last = widths.size() - 1](const Tensor& x) {
      const Tensor y = linear->forward(x.flatten(1));
      return i == last ? y : y.relu();
    });
  }
  register_module("layers", layers);
}

}  // namespace lockstep
