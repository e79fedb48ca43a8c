// SPDX-License-Identifier: Apache-2.0
// tests/step_fuzz/step_fuzz_test.cc: random programs over the public API of a training step: a legal one gives what one
// rank of plain libtorch gives, an illegal one is refused on every rank by name (docs/step-rules.md).
//
//   LOCKSTEP_FUZZ_ROUNDS    number of programs
//   LOCKSTEP_FUZZ_SEED      seed of the first; each has the next one. None: 1
//   LOCKSTEP_FUZZ_FAILURES  stop after so many
//   LOCKSTEP_FUZZ_PAIRS     if set: prints how often each pair of features occurred, and not only each feature
#include <gtest/gtest.h>

#include <unistd.h>

#include <chrono>
#include <csignal>
#include <iostream>

#include "tests/step_fuzz/coverage.h"
#include "tests/step_fuzz/generator.h"
#include "tests/step_fuzz/rules.h"
#include "tests/step_fuzz/run.h"
#include "tests/support.h"

namespace lockstep::fuzz {
namespace {

constexpr std::chrono::seconds kShrinking{20};  // for each failure

char now_running[64];  // told if it ends the process

extern "C" void name_the_program(int signal) {
  (void)!::write(STDERR_FILENO, now_running, sizeof now_running);
  std::signal(signal, SIG_DFL);
  std::raise(signal);
}

// The shortest program that breaks the same rule and fails, as text. As faults may come and go, the first one is shown,
// too.
std::string report(const Program& program, const std::string& fault) {
  const Judgement first = judge(program);
  const auto end = std::chrono::steady_clock::now() + kShrinking;
  std::string last = fault;
  const Program small = shortest(program, [&](const Program& simpler) {
    if (std::chrono::steady_clock::now() > end) return false;
    const Judgement judgement = judge(simpler);
    if (judgement.verdict != first.verdict || judgement.rule != first.rule) return false;
    const std::string its = fault_of(simpler, judgement);
    if (!its.empty()) last = its;
    return !its.empty();
  });
  return text_of(small) + last + "\nfound as:\n" + text_of(program) + fault;
}

TEST(StepFuzz, every_program_is_right_or_refused_by_name) {
  const int programs = testing::rounds("LOCKSTEP_FUZZ_ROUNDS", 200);
  const uint64_t seed = first_seed();
  std::cout << programs << " programs from LOCKSTEP_FUZZ_SEED=" << seed << std::endl;
  const int most_failures = testing::rounds("LOCKSTEP_FUZZ_FAILURES", 3);
  Coverage coverage;
  int failures = 0;
  for (const int signal : {SIGSEGV, SIGBUS, SIGABRT}) std::signal(signal, name_the_program);
  for (int i = 0; i < programs && failures < most_failures; ++i) {
    const Program program = random_program(seed + static_cast<uint64_t>(i));
    std::snprintf(now_running, sizeof now_running, "\nended by program %llu\n",
                  static_cast<unsigned long long>(program.seed));
    const Judgement judgement = judge(program);
    coverage.count(features_of(program), judgement.verdict == Verdict::kLegal ? "legal" : "illegal: " + judgement.rule);
    const std::string fault = fault_of(program, judgement);
    if (fault.empty()) continue;
    ++failures;
    ADD_FAILURE() << report(program, fault);
  }
  coverage.print();
}

}  // namespace
}  // namespace lockstep::fuzz
