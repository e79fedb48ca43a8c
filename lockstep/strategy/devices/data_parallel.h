// SPDX-License-Identifier: Apache-2.0
// strategy/devices/data_parallel.h: `data_parallel`: a thread per device, one of them the master, as in torch's
// DataParallel.
//
//   scatter         the batch over the devices
//   replicate       the parameters of device 0 on every device
//   parallel_apply  forward on every device
//   gather          the outputs on device 0
//   loss            on device 0; its gradient is scattered to the devices again
//   backward        on every device
//   reduce          the gradients onto device 0
//   update          of device 0's parameters
//
// Device 0 acts as a parameter server: its work grows with the number of devices, and report() says by how much. The
// loss is computed over the whole batch at once, so that losses that are not a mean over samples are exact too.
//
// Owns:    the devices' threads, a replica per device
// Threads: one scheduling thread
// Ranks:   inside one process
#pragma once

#include <memory>

#include "lockstep/strategy.h"

namespace lockstep {

std::unique_ptr<Strategy> make_data_parallel(const World& world, const Task& task, const StrategyOptions& options);

}  // namespace lockstep
