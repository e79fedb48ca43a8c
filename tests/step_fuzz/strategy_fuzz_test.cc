// SPDX-License-Identifier: Apache-2.0
// tests/step_fuzz/strategy_fuzz_test.cc: random runs of the strategies, with devices as threads, ranks and stores: each gives
// what a replay on one device with plain libtorch gives, or is refused by name. The variables are those of
// step_fuzz_test.cc.
#include <gtest/gtest.h>

#include "tests/step_fuzz/coverage.h"
#include "tests/step_fuzz/strategy_program.h"
#include "tests/support.h"

namespace lockstep::fuzz {
namespace {

TEST(StrategyFuzz, every_run_gives_what_one_device_gives) {
  const int programs = testing::rounds("LOCKSTEP_FUZZ_ROUNDS", 200);
  const int most_failures = testing::rounds("LOCKSTEP_FUZZ_FAILURES", 3);
  const std::uint64_t seed = first_seed();
  std::cout << programs << " programs from LOCKSTEP_FUZZ_SEED=" << seed << std::endl;
  Coverage coverage;
  int failures = 0;
  for (int i = 0; i < programs && failures < most_failures; ++i) {
    const StrategyProgram program = random_strategy_program(seed + static_cast<std::uint64_t>(i));
    const std::string refusal = refusal_of(program);
    coverage.count(features_of(program), refusal.empty() ? "legal" : "illegal: " + refusal);
    if (fault_of(program).empty()) continue;
    ++failures;
    const StrategyProgram small = shortest(program);
    ADD_FAILURE() << text_of(small) << fault_of(small);
  }
  coverage.print();
}

}  // namespace
}  // namespace lockstep::fuzz
