// SPDX-License-Identifier: Apache-2.0
// tests/step_fuzz/run.h: runs a program on ranks that are threads, and says whether what happened is what the rules and
// the reference say.
#pragma once

#include <array>
#include <string>

#include "tests/step_fuzz/program.h"
#include "tests/step_fuzz/rules.h"

namespace lockstep::fuzz {

// What is wrong with the run of this program; empty: nothing.
std::string fault_of(const Program& program, const Judgement& judgement);

}  // namespace lockstep::fuzz
