// SPDX-License-Identifier: Apache-2.0
#include "tests/step_fuzz/run.h"

#include <algorithm>

#include "tests/step_fuzz/processes.h"
#include "tests/step_fuzz/rank.h"

namespace lockstep::fuzz {
namespace {

Outcome run_in_threads(const Program& program, const AllExpected& expected) {
  Outcome outcome;
  try {
    run_ranks(program.ranks,
              [&](World& world) {
                const auto rank = static_cast<std::size_t>(world.rank());
                try {
                  outcome.differences[rank] = run_rank(program, expected, world);
                } catch (const std::exception& error) {
                  outcome.errors[rank] = error.what();
                  throw;
                }
              },
              {.timeout = kTimeout});
  } catch (const std::exception&) {  // noted above
  }
  return outcome;
}

Outcome run(const Program& program, bool compares) {
  if (program.processes) return run_in_processes(program, compares);
  return run_in_threads(program, compares ? expected_of(program) : AllExpected());
}

std::string all_errors(const Outcome& outcome) {
  std::string text;
  for (std::size_t rank = 0; rank < kMaxRanks; ++rank)
    if (!outcome.errors[rank].empty()) text += "rank " + std::to_string(rank) + ": " + outcome.errors[rank] + "\n";
  return text;
}

std::string fault_of_legal(const Program& program) {
  const Outcome outcome = run(program, /*compares=*/true);
  if (const std::string errors = all_errors(outcome); !errors.empty()) return "a legal program was refused:\n" + errors;
  for (int rank = 0; rank < program.ranks; ++rank)
    if (const auto& text = outcome.differences[static_cast<std::size_t>(rank)]; !text.empty())
      return "rank " + std::to_string(rank) + " computed something else than one rank does:\n" + text;
  return {};
}

std::string fault_of_illegal(const Program& program, const Judgement& judgement) {
  const Outcome outcome = run(program, /*compares=*/false);
  const std::string errors = all_errors(outcome);
  for (int rank = 0; rank < program.ranks; ++rank)
    if (outcome.errors[static_cast<std::size_t>(rank)].empty())
      return "rank " + std::to_string(rank) + " went on in spite of " + judgement.rule + "\n" + errors;
  const bool named = std::any_of(judgement.causes.begin(), judgement.causes.end(),
                                 [&](const std::string& cause) { return errors.find(cause) != std::string::npos; });
  return named ? "" : "no error names the cause: " + judgement.rule + "\n" + errors;
}

}  // namespace

std::string fault_of(const Program& program, const Judgement& judgement) {
  return judgement.verdict == Verdict::kLegal ? fault_of_legal(program) : fault_of_illegal(program, judgement);
}

}  // namespace lockstep::fuzz
