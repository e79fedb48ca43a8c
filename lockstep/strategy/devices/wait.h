// SPDX-License-Identifier: Apache-2.0
// strategy/devices/wait.h: how a function on one device waits for a signal from another.
//
// Threads: the device's
// Ranks:   inside one process
#pragma once

#include <functional>
#include <string>

#include "lockstep/collective/shm/memory/flag.h"
#include "lockstep/devices.h"

namespace lockstep {

// Blocks until done(). Whoever makes it true raises or rings `flag` afterwards. Throws PeerLost: another device failed,
// or the timeout has passed; `what` names what is waited for.
void wait_on(Device& device, shm::Flag& flag, const std::string& what, const std::function<bool()>& done);

}  // namespace lockstep
