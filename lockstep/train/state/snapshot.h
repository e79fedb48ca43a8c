// SPDX-License-Identifier: Apache-2.0
// train/state/snapshot.h: everything that training depends on, as one TensorFile. Resuming is bit-exact, except with lossy
// compression or asynchronous servers.
//
//   model.NAME               parameters and buffers
//   optimizer.NAME.KEY       the optimizer's state of a parameter
//   strategy.NAME            what the strategy keeps beside those
//   rng.DEVICE.RANK          the state of a rank's random generators
//   metadata                 position in the run; the values of the options that must not change (resume_fingerprint())
//
// The file is the same where ranks hold parts of the model (a pipeline): a rank sends what rank 0 does not hold when its
// turn to be written comes. So rank 0 never has more than one tensor of others in memory, and a checkpoint can be
// read by any number of stages, and by one device.
//
// Flow:    strategy/ + Position <-> here <-> checkpoint/
// Threads: one thread
// Ranks:   take_snapshot, Snapshot::send, share_checkpoint, restore_snapshot and restore_parts are collective
#pragma once

#include <functional>
#include <map>
#include <optional>
#include <string>

#include "lockstep/checkpoint.h"
#include "lockstep/checkpoint/checkpoint_folder.h"
#include "lockstep/checkpoint/safetensors.h"
#include "lockstep/strategy.h"
#include "lockstep/train/options/options.h"
#include "lockstep/train/reports/progress.h"
#include "lockstep/train/state/loop_state.h"
#include "lockstep/world.h"

namespace lockstep {

// Advice about a number that is not finite, where there are checkpoints.
inline constexpr const char* kLowerRate =
    "the checkpoints are good: go on from one with --resume --from-step STEP and a lower --lr";

// The content of a checkpoint. It refers to the strategy's tensors: copy or write it before the next step.
struct Snapshot {
  TensorFile file;             // on rank 0: a meta tensor where another rank has the values
  FetchTensor fetch;           // on rank 0: receives one of those
  std::function<void()> send;  // on other ranks: sends what rank 0 fetches, in its order. Blocks
};

// Gathers every rank's generator state (a few KB each), and the names of what each rank holds, where rank 0 does not hold
// all. Blocks.
Snapshot take_snapshot(const World& world, Strategy& strategy, const Position& position, const TrainOptions& options);

// Throws on all ranks NonFiniteError naming a parameter that is not finite: such a model is not worth a checkpoint. Blocks.
void require_finite_everywhere(const World& world, Strategy& strategy, const Position& position);

// A state that was kept: a checkpoint, or copies in memory.
struct SavedState {
  std::map<std::string, std::string> metadata;
  std::map<std::string, Tensor> shapes;  // of all its tensors, on the meta device
  std::function<Tensor(const std::string& name)> read;
};

// A checkpoint that rank 0 has found, for all ranks; nothing: it has found none. Every rank calls read() with the same name, and gets
// the tensor, which rank 0 sends: machines need no shared disk. Blocks.
std::optional<SavedState> share_checkpoint(const World& world, std::optional<LoadedCheckpoint> found);

// Puts model, optimizer, generator and position back, tensor by tensor. A rank without a saved generator keeps its own.
// Throws CheckpointError: a tensor that is missing or of another shape, another model,
// an option that must not change and has.
Position restore_snapshot(const SavedState& saved, const World& world, Strategy& strategy, const TrainOptions& options);

// A checkpoint says this about its run.
struct SavedRun {
  Position position;
  Json settings;    // resume_fingerprint()
  std::string fit;  // TrainOptions::fit; "": an older file
};
SavedRun saved_run(const std::map<std::string, std::string>& metadata);  // throws CheckpointError

// Puts parameters and buffers alone into a model on the CPU. Collective. Throws CheckpointError: another model.
void restore_model(const SavedState& saved, torch::nn::Module& model);

// Metadata of a state in memory: the event of the last step, to be written once more by those who go on; "": none.
constexpr const char* kLastStep = "lockstep.last_step";

// The state that this rank keeps in memory for those who go on after a loss. common: what all ranks have alike; nothing in place, and
// where ranks hold parts of the model. own: the position, its generators, and such a part, or in place its buffers. Blocks where
// the strategy has to make its replicas one model. Refers to the strategy's tensors.
struct StateParts {
  TensorFile common;
  TensorFile own;
};
StateParts state_parts(const World& world, Strategy& strategy, const Position& position, const TrainOptions& options,
                       bool in_place);

// Tells whether a rank has only a part of the model (a pipeline).
bool is_in_parts(Strategy& strategy);

// Restores as restore_snapshot() does, from memory, where every rank has the common part. A part that this rank holds now, and neither it nor its
// machine has kept, comes from the first rank that has it: after a loss a pipeline may be cut elsewhere, and the machines may have another
// order. Collective. nullopt on all ranks, which a warning explains: a part was lost with its machine. Throws
// CheckpointError: another model, other options.
std::optional<Position> restore_parts(const LoopState::Found& found, const World& world, Strategy& strategy,
                                      const TrainOptions& options);

// The first tensor of this rank that holds NaN or infinity: its name, or "" if there is none.
std::string first_non_finite(const NamedTensors& tensors);

}  // namespace lockstep
