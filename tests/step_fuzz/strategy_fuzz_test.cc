// SPDX-License-Identifier: Apache-2.0
// tests/step_fuzz/strategy_fuzz_test.cc: random runs of the strategies, with devices as threads, ranks and stores: each gives
// what a replay on one device with plain libtorch gives, or is refused by name. The variables are those of
// step_fuzz_test.cc.
#include <gtest/gtest.h>

#include "lockstep/base/text.h"
#include "lockstep/strategy/option_names.h"
#include "tests/step_fuzz/coverage.h"
#include "tests/step_fuzz/strategy_program.h"
#include "tests/support.h"

namespace lockstep::fuzz {
namespace {

TEST(StrategyFuzz, every_run_gives_what_one_device_gives) {
  const int programs = testing::rounds("LOCKSTEP_FUZZ_ROUNDS", 200);
  const int most_failures = testing::rounds("LOCKSTEP_FUZZ_FAILURES", 3);
  const uint64_t seed = first_seed();
  std::cout << programs << " programs from LOCKSTEP_FUZZ_SEED=" << seed << std::endl;
  Coverage coverage;
  int failures = 0;
  for (int i = 0; i < programs && failures < most_failures; ++i) {
    const StrategyProgram program = random_strategy_program(seed + static_cast<uint64_t>(i));
    const std::string refusal = refusal_of(program);
    coverage.count(features_of(program), refusal.empty() ? "legal" : "illegal: " + refusal);
    if (fault_of(program).empty()) continue;
    ++failures;
    const StrategyProgram small = shortest(program);
    ADD_FAILURE() << text_of(small) << fault_of(small);
  }
  coverage.print();
}

// On cores; with LOCKSTEP_TEST_DEVICES=cuda (tests/gpus.cmake) each worker's devices are GPUs.
class WorkersInTurn : public ::testing::TestWithParam<std::tuple<KVStoreKind, int>> {};
INSTANTIATE_TEST_SUITE_P(Workers, WorkersInTurn,
                         ::testing::Combine(::testing::Values(KVStoreKind::kDistAsync, KVStoreKind::kDistBounded),
                                            ::testing::Values(1, 2, 3, 4)),
                         [](const auto& test) {
                           return concat(name_of(std::get<0>(test.param)), "_", std::get<1>(test.param));
                         });

TEST_P(WorkersInTurn, give_what_one_device_gives) {
  const auto [kind, workers] = GetParam();
  const std::pair<Rule, int> rules_and_devices[]{
      {Rule::kMomentum, 1}, {Rule::kNesterov, 1}, {Rule::kNesterov, 2}, {Rule::kAdamW, 1}};
  for (const auto& [rule, devices] : rules_and_devices) {
    const StrategyProgram program = workers_in_turn(kind, rule, workers, devices);
    EXPECT_EQ(fault_of(program), "") << text_of(program);
  }
}

}  // namespace
}  // namespace lockstep::fuzz
