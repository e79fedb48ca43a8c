// strategy/averaging/flat_block.h: all weights of a network as one contiguous block, so that one copy moves a model. S4.
//
// Owns:    the block; the parameters become parts of it
// Threads: one thread per module
// Ranks:   models with the same parameters have the same block
#pragma once

#include <torch/nn/module.h>
#include <torch/types.h>

#include <functional>

namespace lockstep {

// Where a block of so many values gets its memory; torch::empty, or World::allocate.
using AllocateBlock = std::function<torch::Tensor(torch::IntArrayRef sizes, const torch::TensorOptions& options)>;

// Moves every trained parameter into one new block and returns it, (values) long. Names, shapes, strides and values
// stay; each parameter begins on a cache line. Throws UsageError: parameters of several dtypes.
torch::Tensor make_flat_block(torch::nn::Module& model, const AllocateBlock& allocate);

}  // namespace lockstep
