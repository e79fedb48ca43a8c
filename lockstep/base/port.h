// SPDX-License-Identifier: Apache-2.0
// base/port.h: who listens at a port of this machine, for messages.
//
// Threads: any
#pragma once

#include <string>

namespace lockstep {

// "pid 4711 (python train.py)"; "a process of user 1000" where this user may not look at it; "" where nobody listens.
std::string listener_of_port(int port);

}  // namespace lockstep
