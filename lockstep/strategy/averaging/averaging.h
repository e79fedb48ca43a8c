// SPDX-License-Identifier: Apache-2.0
// strategy/averaging/averaging.h: `averaging`: every device trains a replica of its own, and the parameters are averaged
// every h batches.
//
//   1 scheduling thread prepares a batch and hands each of N device threads its part
//   N device threads    forward, backward and update of their own replica, without exchange
//   every h batches     replica 0 = the mean of all replicas, weighted by the samples they saw; then copied to all
//
// With h = 1 and plain SGD this is data parallel training, step by step. Between processes and machines the averages
// are averaged once more, through World (local SGD: Stich, 2019): the bytes sent per batch fall by h. With an outer
// learning rate or momentum, the difference between the last average and the new one is a gradient for a step with
// Nesterov's momentum (DiLoCo: Douillard et al., 2023).
//
// Momentum belongs to each replica. synchronise() (before validation and checkpoints) averages at once, and the
// replicas of all ranks continue with the momentum and the buffers of rank 0's replica 0. A run that resumes from that
// checkpoint has the same bits as one that went on.
//
// Owns:    the devices' threads; per device a replica and one flat block of its parameters
// Threads: one scheduling thread
// Ranks:   every rank has its own devices; all ranks make the same calls. Sends 2(R-1)/R K every h batches over R ranks,
//          and 16 bytes for the loss of each batch
#pragma once

#include <memory>

#include "lockstep/strategy.h"

namespace lockstep {

std::unique_ptr<Strategy> make_averaging(const World& world, const Task& task, const StrategyOptions& options);

}  // namespace lockstep
