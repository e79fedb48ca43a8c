// SPDX-License-Identifier: Apache-2.0
// strategy/kvstore/worker.h: a worker's side of a store on servers.
//
// Flow:    values of the devices -> summed here (level 1) -> link.h -> servers (level 2), and back
// Owns:    its ends of the links; for each server a block to send from and one to receive into: 2 K bytes
// Threads: one thread
// Ranks:   a worker
#pragma once

#include <memory>

#include "lockstep/strategy/kvstore/messages.h"
#include "lockstep/strategy/kvstore/store.h"

namespace lockstep {

// devices: may be null, then the calling thread makes all copies. The store says goodbye at its end, but not while an exception is
// in flight, so that the servers notice that this worker is lost.
std::unique_ptr<Store> make_kv_worker(const DistSetting& setting, Devices* devices);

}  // namespace lockstep
