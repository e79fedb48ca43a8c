// SPDX-License-Identifier: Apache-2.0
// tests/step_fuzz/generator.h: random programs, legal and illegal; and the shortest program that still fails.
#pragma once

#include <functional>

#include "tests/step_fuzz/program.h"

namespace lockstep::fuzz {

// A program that the rules judge: about a third are illegal.
Program random_program(uint64_t seed);

// The program without all that it still `fails` without.
Program shortest(Program program, const std::function<bool(const Program&)>& fails);

}  // namespace lockstep::fuzz
