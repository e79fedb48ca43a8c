// SPDX-License-Identifier: Apache-2.0
// tests/step_fuzz/step_fuzz_defects_test.cc: the fuzzer finds each of the deliberate defects of tests/defects.py within 500
// programs. Sources that have one are compiled again into this binary, where their symbols come before the library's.
#include <gtest/gtest.h>

#include <iostream>

#include "tests/defects.h"
#include "tests/step_fuzz/generator.h"
#include "tests/step_fuzz/rules.h"
#include "tests/step_fuzz/run.h"

namespace lockstep::fuzz {
namespace {

constexpr int kPrograms = 500;

class Defect : public ::testing::TestWithParam<const char*> {
 protected:
  void TearDown() override { present_defect() = {}; }
};

INSTANTIATE_TEST_SUITE_P(
    All, Defect,
    ::testing::Values("barrier 1 is left out", "barrier 2 is left out", "the hash of the settings is stale",
                      "the number of backward() is dropped", "the number of backward() is wrong in join()",
                      "dropped gradients count", "unused parameters get a gradient", "samples are not weighted",
                      "the loss scale is dropped", "an overflow is not seen", "a version is not marked",
                      "a norm of one slice", "an unfrozen parameter is accepted", "buffers stay each rank's own",
                      "a residual is lost", "a residual keeps its old unit", "the trust ratio is dropped",
                      "layerwise rules are not clipped", "rows of an embedding are not weighted",
                      "batch norm counts ranks alike", "the hash of the parameters is left out"),
    [](const auto& each) { return "number_" + std::to_string(each.index + 1); });

TEST_P(Defect, is_found_within_500_programs) {
  present_defect() = GetParam();
  for (int i = 0; i < kPrograms; ++i) {
    Program program = random_program(static_cast<uint64_t>(i));
    program.processes = false;  // the server of processes does not know the defect
    const std::string fault = fault_of(program, judge(program));
    if (fault.empty()) continue;
    std::cout << GetParam() << ": found by program " << i + 1 << '\n';
    return;
  }
  ADD_FAILURE() << "not found: " << GetParam();
}

}  // namespace
}  // namespace lockstep::fuzz
