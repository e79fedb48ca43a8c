// SPDX-License-Identifier: Apache-2.0
#include "lockstep/models.h"

#include "lockstep/base/text.h"
#include "lockstep/error.h"

namespace lockstep {

LeNetImpl::LeNetImpl(const LeNetOptions& options) {
  const auto left = [](int64_t size) { return ((size - 2) / 2 - 4) / 2; };  // of a side, after both convolutions
  if (options.height < 14 || options.width < 14)
    throw UsageError({.what = concat("lenet with images of ", options.height, " x ", options.width),
                      .next = "give images of at least 14 x 14, or take --model mlp"});
  const auto conv1 = register_module("conv1", torch::nn::Conv2d(options.channels, 20, 3));
  const auto conv2 = register_module("conv2", torch::nn::Conv2d(20, 50, 5));
  const auto fc1 = register_module("fc1", torch::nn::Linear(50 * left(options.height) * left(options.width), 128));
  const auto fc2 = register_module("fc2", torch::nn::Linear(128, options.classes));
  const auto pooled = [](const auto& conv) {
    return [conv](const Tensor& x) { return torch::avg_pool2d(conv->forward(x).relu_(), 2); };
  };
  add_piece("conv1", {conv1.get()}, pooled(conv1));  // (B, 20, 13, 13)
  add_piece("conv2", {conv2.get()}, pooled(conv2));  // (B, 50, 4, 4)
  add_piece("fc1", {fc1.get()}, [fc1](const Tensor& x) { return fc1->forward(x.flatten(1)).relu_(); });  // (B, 128)
  add_piece("fc2", {fc2.get()}, [fc2](const Tensor& x) { return fc2->forward(x); });
}

}  // namespace lockstep
