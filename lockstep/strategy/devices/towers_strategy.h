// SPDX-License-Identifier: Apache-2.0
// strategy/devices/towers_strategy.h: `towers`: data parallel training out of the calls of lockstep/towers.h.
//
//   update on every device   a copy of the parameters and an optimizer per device, as in "Dive into Deep Learning"
//   update on the CPU        one set of parameters and one optimizer; gradients are summed in the pass that updates, as in
//                            TensorFlow's multi-tower CIFAR-10 example
//
// Owns:    the devices' threads, a replica per device
// Threads: one scheduling thread
// Ranks:   inside one process
#pragma once

#include <memory>

#include "lockstep/strategy.h"

namespace lockstep {

std::unique_ptr<Strategy> make_towers(const World& world, const Task& task, const StrategyOptions& options);

}  // namespace lockstep
