// SPDX-License-Identifier: Apache-2.0
// strategy/averaging/flat_block.h: all trained parameters of a model in one contiguous block, so that one copy moves a
// model.
//
// Owns:    the block; the parameters become parts of it
// Threads: one thread per module
// Ranks:   models with the same parameters have the same block
#pragma once

#include <vector>

#include "lockstep/devices.h"
#include "lockstep/model/parameters.h"

namespace lockstep {

// Moves every trained parameter into one new block of shape (values), on the CPU from world.allocate(), and returns it.
// Names, shapes, strides and values stay; each parameter begins on a cache line. Throws UsageError: parameters of several
// dtypes, of 16 bits, or with gaps in memory.
Tensor make_flat_block(const NamedTensors& parameters, const World& world);

// As flat_blocks().
Tensors make_flat_blocks(const std::vector<NamedTensors>& nets);

// The two halves of average(), on the devices: block 0 becomes the sum over i of samples[i] / all * blocks[i]; it is copied.
void mean_onto_first(Devices& devices, const Tensors& blocks, const std::vector<int64_t>& samples, int64_t all);
void copy_from_first(Devices& devices, const Tensors& blocks);

// Throws UsageError if a parameter has 16 bits: optimizers keep a float32 copy of it, which would not see the average.
void refuse_16_bit_parameters(const NamedTensors& parameters);

}  // namespace lockstep
