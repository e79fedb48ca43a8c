// SPDX-License-Identifier: Apache-2.0
// lockstep/layout.h: the memory format of images and of convolutions' weights.
//
// Flow:    set_layout() after the model is made, in_layout() for every batch before forward()
// Owns:    nothing
// Threads: one thread per module
// Ranks:   no communication, but all ranks of a world need the same layout
#pragma once

#include <torch/nn/module.h>
#include <torch/types.h>

namespace lockstep {

enum class Layout { kContiguous, kChannelsLast };

// Rewrites the 4-d parameters in place; names, shapes and values stay. Call it before an optimizer or a strategy takes
// the parameters.
void set_layout(torch::nn::Module& model, Layout layout);

// A batch in that layout: (B, C, H, W) is copied if its layout differs; other shapes are returned unchanged.
torch::Tensor in_layout(const torch::Tensor& data, Layout layout);

// The faster layout for this model: channels last on a CPU for a model with 4-d weights (oneDNN's own order, which saves
// reordering before and after each convolution), contiguous otherwise. docs/design/lenet-step.md has the figures.
Layout preferred_layout(const torch::nn::Module& model, torch::Device device);

}  // namespace lockstep
