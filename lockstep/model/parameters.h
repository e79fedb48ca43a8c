// SPDX-License-Identifier: Apache-2.0
// model/parameters.h: the tensors of a model as the exchange sees them: named, flat, and the same on every rank.
//
// Flow:    a module -> here -> model/parameter_block.h, step/, strategy/, checkpoint/
// Threads: one thread per module
// Ranks:   require_same_model, broadcast_tensors and broadcast_model are collective
#pragma once

#include <torch/nn/module.h>

#include <set>

#include "lockstep/world.h"

namespace lockstep {

// The tensors in the module's order; one that has two names comes once, under its first.
NamedTensors named_parameters(const torch::nn::Module& model);
NamedTensors named_buffers(const torch::nn::Module& model);
NamedTensors named_tensors(const torch::nn::Module& model);  // the parameters, then the buffers

// Those that require gradients.
NamedTensors trainable(NamedTensors parameters);

// Without the names.
Tensors tensors_of(const NamedTensors& named);

// The parameters, then the buffers.
Tensors tensors_of(const torch::nn::Module& model);

// Names, as named_parameters() has them, of the weights of every Embedding and EmbeddingBag with sparse(true): their
// gradients are sparse.
std::set<std::string> sparse_parameters(const torch::nn::Module& model);

// The parameters of normalisation layers (modules whose own parameters are vectors, and LayerNorm) if `kinds` has "norm", and those
// called bias if it has "bias": "norm,bias", or one of them. Throws UsageError.
Tensors norms_and_biases(const torch::nn::Module& model, const std::string& kinds);

// The values in memory order as one dimension, without a copy: two tensors of the same shape and strides agree element
// by element. tensor: dense, any layout.
// Throws UsageError for a tensor with gaps or overlaps.
Tensor dense_view(const Tensor& tensor);

// Compares name, dtype, shape, strides and requires_grad of every tensor over the ranks, before any of them is sent.
// Throws MismatchError naming both ranks and the first tensor that differs.
void require_same_model(const World& world, const NamedTensors& tensors);

// Every rank's values become root's: one broadcast per dtype. Sends K from the root.
void broadcast_tensors(const World& world, const NamedTensors& tensors, int root = 0);
void broadcast_model(const World& world, const torch::nn::Module& model, int root = 0);  // parameters and buffers

}  // namespace lockstep
