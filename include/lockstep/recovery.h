// SPDX-License-Identifier: Apache-2.0
// lockstep/recovery.h: a program that goes on when a rank is lost. docs/recovery.md says what survives what.
//
// Flow:    `lockstep run --max-restarts N` -> recover() -> World, training, PeerLost -> recover() again
// Threads: the main one
// Ranks:   every rank calls it; a rank that took the place of a lost one calls it for the first time
#pragma once

#include <functional>

namespace lockstep {

// Calls `body` and returns what it returns. When `body` throws because a rank was lost, and the launcher replaces lost
// ranks, all ranks go on: `body` is called again, in the next generation of the job, and makes a new World. So everything
// that depends on the old one must be inside of `body`; what does not, such as an open data set, may stay outside.
// In between it waits for the launcher, at most a minute. Otherwise the exception is rethrown.
int recover(const std::function<int()>& body);

}  // namespace lockstep
