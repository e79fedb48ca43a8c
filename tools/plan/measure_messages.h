// SPDX-License-Identifier: Apache-2.0
// tools/plan/measure_messages.h: what messages between machines take without a link: two machines, or four, that are threads of
// this process, and Gloo between them over loopback, encrypted as always.
//
// Flow:    tools/plan/measure.h -> here -> tools/plan/profile.h
// Threads: starts some, and ends them
// Ranks:   call it in a process of its own: memory that was freed before would hide what connections take
#pragma once

#include "tools/plan/profile.h"

namespace lockstep::plan {

// Sets Profile::loopback, loopback_work and connection_bytes. Takes about a second. Throws as World does.
void measure_messages(Profile& profile);

}  // namespace lockstep::plan
