// SPDX-License-Identifier: Apache-2.0
// lockstep/activation_checkpoint.h: activation checkpointing: backward computes a part of forward again, instead of
// keeping its activations (Chen et al., "Training deep nets with sublinear memory cost", 2016; torch.utils.checkpoint).
//
//   torch::Tensor forward(torch::Tensor x) {
//     for (auto& block : blocks) x = lockstep::checkpoint([&](const torch::Tensor& in) { return block->forward(in); }, x);
//     return x;
//   }
//
// Flow:    in a model's forward(); gradients go to the inputs and to the parameters that the function uses
// Owns:    until backward the inputs and a copy of the function, which must keep alive what it uses
// Threads: any; backward runs the function on the thread of autograd
// Ranks:   no communication of its own. A function that communicates does so twice
//
// Gradients are the same bit for bit as without it. A parameter that is used both inside and outside is the exception:
// its contributions are added in another order. Dropout draws the same numbers again, and the generators are afterwards
// where they would be. Autocast is as it was. Works with DistributedDataParallel, in every strategy, inside another
// checkpoint(), and with torch::autograd::grad.
//
// The function runs twice: what it changes besides (running statistics of batch normalisation) is changed twice, as
// with torch.utils.checkpoint.
#pragma once

#include <functional>

#include "lockstep/named_tensor.h"

namespace lockstep {

// Returns function(inputs). Where no gradient is needed, that is all. Tensors that the function uses and that require
// gradients must be among the inputs, or leaves such as parameters.
// Throws UsageError: the function uses a tensor that was computed outside, changes an input in place (if the input
// requires gradients, c10::Error), or returns an undefined tensor. Backward throws UsageError: the function returned
// something else the second time, or create_graph.
Tensors checkpoint(const std::function<Tensors(const Tensors&)>& function, const Tensors& inputs);

// The same for one input and one output.
Tensor checkpoint(const std::function<Tensor(const Tensor&)>& function, const Tensor& input);

}  // namespace lockstep
