// SPDX-License-Identifier: Apache-2.0
// tests/step_fuzz/processes.h: runs the ranks of a program as processes of one machine. They are forked by a server that was
// forked itself before any test began, so they inherit none of torch's threads.
#pragma once

#include "tests/step_fuzz/rank.h"

namespace lockstep::fuzz {

// compares: with the reference. timeout: of the ranks' waits.
Outcome run_in_processes(const Program& program, bool compares, std::chrono::milliseconds timeout);

}  // namespace lockstep::fuzz
