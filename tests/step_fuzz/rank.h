// SPDX-License-Identifier: Apache-2.0
// tests/step_fuzz/rank.h: what one rank does in a program: it makes its trainers, runs its operations, and compares its
// parameters with the reference.
#pragma once

#include <array>
#include <chrono>
#include <map>
#include <string>
#include <vector>

#include "lockstep/world.h"
#include "tests/step_fuzz/program.h"
#include "tests/step_fuzz/reference.h"

namespace lockstep::fuzz {

// Of every wait. Many illegal programs end at a deadline, so they get a short one first; under load a rank in good order
// may miss that.
inline constexpr std::chrono::milliseconds kTimeout{8000}, kShortTimeout{1500};

using AllExpected = std::vector<std::map<int, Expected>>;  // [trainer], by color

AllExpected expected_of(const Program& program);

// What differs from what is expected; nothing is compared if that is empty. Throws what the program throws.
std::string run_rank(const Program& program, const AllExpected& expected, World& world);

// Of all ranks.
struct Outcome {
  std::array<std::string, kMaxRanks> errors;
  std::array<std::string, kMaxRanks> differences;
};

}  // namespace lockstep::fuzz
