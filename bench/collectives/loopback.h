// SPDX-License-Identifier: Apache-2.0
// bench/collectives/loopback.h: the floor of everything that goes through sockets on this machine.
//
// Threads: starts one and joins it
// Ranks:   no communication
#pragma once

namespace lockstep::bench {

// Median seconds of one byte there and back over TCP on 127.0.0.1. Throws SystemError.
double loopback_round_trip();

}  // namespace lockstep::bench
