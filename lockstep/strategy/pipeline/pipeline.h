// SPDX-License-Identifier: Apache-2.0
// strategy/pipeline/pipeline.h: `pipeline`: consecutive pieces of the model on different devices (model parallelism).
//
//   stage 0        stage 1              stage p-1
//   pieces 0-3 --> pieces 4-6 --> ... --> pieces .. and the loss     activations forward
//              <--            <-- ... <--                            gradients back
//
// A batch is cut into m micro-batches, so that stages work at the same time (strategy/pipeline/schedule.h). Their losses
// are weighted by samples: the gradient is that of the whole batch. With d times as many devices as stages there are d
// replicas of each stage: the batch is cut into d parts, and the gradients of a stage are summed over its replicas.
//
// Device i has stage i % p of replica i / p. A device is one of
//
//   a thread   in a world of one rank. Activations pass through channels without a copy; the replicas share parameters,
//              and the optimizer sums gradients and updates on the cores of all devices
//   a rank     in a world of several, on one machine or more. Activations travel as messages. Every rank has the whole
//              model, but activations, gradients and updates only of its stage. synchronise() sends the parameters of all
//              stages to all ranks, and the optimizer's state to rank 0, for validation and checkpoints
//
// Stages pass on tensors as the pieces return them: several where a skip connection crosses the cut. A piece must not
// change its input in place. Batch normalisation sees one micro-batch at a time.
//
// Flow:    the part of a batch that data_world() says -> micro-batches -> strategy/pipeline/stage.h -> optimizer/
// Owns:    the devices' threads and a replica per d; or this rank's replica
// Threads: one scheduling thread
// Ranks:   every rank makes the same calls. Per micro-batch a rank sends its activations forward and their gradients
//          back; per step 2(d-1)/d K of its stage's parameters over d replicas; in synchronise() K
#pragma once

#include <memory>

#include "lockstep/strategy.h"

namespace lockstep {

// Throws UsageError: a model that can't be cut, stages that do not divide the devices; with several ranks also several
// devices in a rank, or clipping by norm (no rank has the norm of all gradients). MismatchError: the ranks' models differ.
std::unique_ptr<Strategy> make_pipeline(const World& world, const Task& task, const StrategyOptions& options);

}  // namespace lockstep
