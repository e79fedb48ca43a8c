// SPDX-License-Identifier: Apache-2.0
// lockstep/average_nets.h: the average of networks that the devices of one process train, each its own.
//
//   const auto blocks = flat_blocks(nets);    // once: all weights of a net are one contiguous block
//   each batch, or every h batches:  devices.run(train your net);  average(devices, blocks);
//
// The strategy `averaging` makes the same calls. lockstep/periodic_average.h averages over ranks.
//
// Flow:    nets -> flat_blocks -> average -> the same weights in every net
// Owns:    nothing; the blocks are the memory of the nets' parameters
// Threads: call from the thread that made the Devices, between two Devices::run()
// Ranks:   inside one process
#pragma once

#include "lockstep/devices.h"
#include "lockstep/task.h"

namespace lockstep {

// Moves the trained parameters of each net into one block of shape (values), on the net's device, and returns the blocks.
// Names, shapes and values stay. Throws UsageError: parameters of several dtypes, with gaps in memory, or of 16 bits
// (optimizers keep a float32 copy of them, which would not see the average); nets of different shapes or strides.
Tensors flat_blocks(const std::vector<ModulePtr>& nets);

// Net 0 becomes the mean of all nets, and is copied to all. blocks[i]: on device i, all of one size. samples[i]: the
// weight of net i, such as the samples that it has seen since the last average; empty: 1 each. Device i reads all blocks
// for its part of the sum, then copies block 0 into its own; no device goes on before all have copied. Blocks. Throws
// UsageError: not one block or weight per device, a negative weight, all weights 0; and what Devices::run() throws.
void average(Devices& devices, const Tensors& blocks, const std::vector<int64_t>& samples = {});

}  // namespace lockstep
