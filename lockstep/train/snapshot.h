// SPDX-License-Identifier: Apache-2.0
// train/snapshot.h: everything that training depends on, as one TensorFile. Resuming is bit-exact, except with lossy
// compression or asynchronous servers.
//
//   model.NAME               parameters and buffers
//   optimizer.NAME.KEY       the optimizer's state of a parameter
//   strategy.NAME            what the strategy keeps beside those
//   rng.DEVICE.RANK          the state of a rank's random generators
//   metadata                 position in the run; the values of the options that must not change (resume_fingerprint())
//
// Flow:    strategy/ + Position <-> here <-> checkpoint/
// Threads: one thread
// Ranks:   take_snapshot and send_to_all are collective
#pragma once

#include <string>

#include "lockstep/checkpoint.h"
#include "lockstep/strategy.h"
#include "lockstep/train/loop.h"
#include "lockstep/world.h"

namespace lockstep {

// Gathers every rank's generator state (a few KB each). Rank 0 gets the whole file, the others an empty one. Blocks.
// Throws NonFiniteError naming the first parameter that is not finite: such a model is not worth keeping.
TensorFile take_snapshot(const World& world, Strategy& strategy, const Position& position, const TrainOptions& options);

// Puts model, optimizer, generator and position back. A rank without a saved generator keeps its own.
// Throws CheckpointError: a tensor that is missing or of another shape, another model,
// or an option that must not change and has.
Position restore_snapshot(const TensorFile& file, const World& world, Strategy& strategy, const TrainOptions& options);

// Rank 0's bytes on every rank.
std::string send_to_all(const World& world, const std::string& bytes);

// The first tensor that holds NaN or infinity: its name, or "" if there is none.
std::string first_non_finite(const std::vector<NamedTensor>& tensors);

}  // namespace lockstep
