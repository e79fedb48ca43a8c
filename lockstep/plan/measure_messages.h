// SPDX-License-Identifier: Apache-2.0
// plan/measure_messages.h: what messages between machines take without a link: two machines, or four, that are threads of this
// process, and Gloo between them over loopback, encrypted as always.
//
// Flow:    plan/measure.h -> here -> plan/profile.h
// Threads: starts some, and ends them
// Ranks:   call each in a process of its own: memory that was freed before would hide what connections take
#pragma once

#include "lockstep/plan/profile.h"

namespace lockstep::plan {

// Profile::loopback, loopback_work and connection_bytes. Takes about a second. Throws as World does.
void measure_loopback(Profile& profile);

// Profile::message..., and store_link_bytes: messages over links as a store has them. Takes about half a second.
void measure_messages(Profile& profile);

}  // namespace lockstep::plan
