// SPDX-License-Identifier: Apache-2.0
// tests/step_fuzz/rules.h: docs/step-rules.md as code: which programs are legal. It knows nothing of how lockstep works,
// and is all that the fuzzer knows when it judges a run.
#pragma once

#include <string>
#include <vector>

#include "tests/step_fuzz/program.h"

namespace lockstep::fuzz {

enum class Verdict : uint8_t {
  kLegal,
  kIllegal,  // every rank is to throw, and one of them to name one of the causes
  kOutside,  // what docs/step-rules.md leaves open: such programs are not run
};

struct Judgement {
  Verdict verdict = Verdict::kLegal;
  std::string rule;                   // that it breaks
  std::vector<std::string> causes{};  // any of which an error may name
};

Judgement judge(const Program& program);

// The program with the operations of this trainer in one of its worlds as its ranks execute them together.
Program as_executed(const Program& program, size_t trainer, int color);

}  // namespace lockstep::fuzz
