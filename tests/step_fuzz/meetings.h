// SPDX-License-Identifier: Apache-2.0
// tests/step_fuzz/meetings.h: a program as its ranks execute it together. A rank that leaves out a call goes on to its
// next one, which the others take for the same: where nothing shows the difference, that is what the program means.
#pragma once

#include <optional>

#include "tests/step_fuzz/program.h"

namespace lockstep::fuzz {

// For a trainer whose ranks have parameters of their own, in one of its worlds: calls of some ranks each, in the order in
// which these meet, as if they were one operation. None: ranks meet in calls of different kinds, or wait for ever.
std::optional<Program> as_ranks_meet(const Program& program, size_t trainer, int color);

}  // namespace lockstep::fuzz
