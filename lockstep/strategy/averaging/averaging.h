// strategy/averaging/averaging.h: `averaging`: every device trains a net of its own, and the parameters are averaged every h
// batches. S4.
//
//   1 scheduling thread prepares a batch and hands each of N device threads its part
//   N device threads    forward, backward and update of their own net, alone
//   every h batches     net 0 = mean of all nets, weighted by the samples they saw; then copied to all
//
// With h = 1 and plain SGD that is data parallel training, step by step. Between processes and machines the average of
// each one's nets is averaged once more, through World (local SGD: Stich, 2019): what is sent per batch falls by h.
// With an outer learning rate or momentum the average is not taken as it is: its difference from the last one is a
// gradient for Nesterov's step (DiLoCo: Douillard et al., 2023).
//
// Owns:    the devices' threads, a net and one flat block of its weights per device
// Threads: one scheduling thread. A device says that it is done after its copy, not before: net 0 never trains on while
//          others still read it
// Ranks:   every rank has its own devices; all ranks make the same calls. Sends 2(N-1)/N * K every h batches, and 16
//          bytes for the loss of each batch
//
// Momentum is each net's own. synchronise() (validation, checkpoints) averages at once, and the nets of all ranks go on
// with the momentum and the buffers of rank 0's net 0: a resumed run has the bits of one that was not interrupted.
#pragma once

#include <memory>

#include "lockstep/strategy.h"

namespace lockstep {

std::unique_ptr<Strategy> make_averaging(const World& world, const Task& task, const StrategyOptions& options);

}  // namespace lockstep
