// SPDX-License-Identifier: Apache-2.0
// tests/step_fuzz/step_fuzz_test.cc: random programs over the public API of a training step: a legal one gives what one
// rank of plain libtorch gives, an illegal one is refused on every rank by name (docs/step-rules.md).
//
//   LOCKSTEP_FUZZ_ROUNDS    number of programs
//   LOCKSTEP_FUZZ_SEED      seed of the first; each has the next one. None: 1
//   LOCKSTEP_FUZZ_FAILURES  stop after so many
//   LOCKSTEP_FUZZ_PAIRS     if set: prints how often each pair of features occurred, and not only each feature
#include <gtest/gtest.h>

#include <chrono>
#include <iostream>

#include "tests/step_fuzz/coverage.h"
#include "tests/step_fuzz/generator.h"
#include "tests/step_fuzz/rules.h"
#include "tests/step_fuzz/run.h"
#include "tests/support.h"

namespace lockstep::fuzz {
namespace {

constexpr std::chrono::seconds kShrinking{20};  // for each failure

// The shortest program that fails like this one, as text.
std::string report(const Program& program) {
  const auto verdict = judge(program).verdict;
  const auto end = std::chrono::steady_clock::now() + kShrinking;
  const Program small = shortest(program, [&](const Program& simpler) {
    if (std::chrono::steady_clock::now() > end) return false;
    const Judgement judgement = judge(simpler);
    return judgement.verdict == verdict && !fault_of(simpler, judgement).empty();
  });
  return text_of(small) + fault_of(small, judge(small));
}

TEST(StepFuzz, every_program_is_right_or_refused_by_name) {
  const int programs = testing::rounds("LOCKSTEP_FUZZ_ROUNDS", 100);
  const std::uint64_t seed = first_seed();
  std::cout << programs << " programs from LOCKSTEP_FUZZ_SEED=" << seed << std::endl;
  const int most_failures = testing::rounds("LOCKSTEP_FUZZ_FAILURES", 3);
  Coverage coverage;
  int failures = 0;
  for (int i = 0; i < programs && failures < most_failures; ++i) {
    const Program program = random_program(seed + static_cast<std::uint64_t>(i));
    const Judgement judgement = judge(program);
    coverage.count(features_of(program), judgement.verdict == Verdict::kLegal ? "legal" : "illegal: " + judgement.rule);
    if (fault_of(program, judgement).empty()) continue;
    ++failures;
    ADD_FAILURE() << report(program);
  }
  coverage.print();
}

}  // namespace
}  // namespace lockstep::fuzz
