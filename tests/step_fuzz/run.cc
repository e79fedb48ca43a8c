// SPDX-License-Identifier: Apache-2.0
#include "tests/step_fuzz/run.h"

#include <algorithm>

#include "tests/step_fuzz/processes.h"
#include "tests/step_fuzz/rank.h"
#include "tests/worlds.h"

namespace lockstep::fuzz {
namespace {

Outcome run_in_threads(const Program& program, const AllExpected& expected, std::chrono::milliseconds timeout) {
  Outcome outcome;
  const auto body = [&](World& world) {
    const auto rank = static_cast<size_t>(world.rank());
    try {
      outcome.differences[rank] = run_rank(program, expected, world);
    } catch (const std::exception& error) {
      outcome.errors[rank] = error.what();
      throw;
    }
  };
  try {
    if (program.machines > 1)
      testing::run_over_machines(machines_of(program), body, {.timeout = timeout});
    else
      run_ranks(program.ranks, body, {.timeout = timeout});
  } catch (const std::exception&) {  // noted above
  }
  return outcome;
}

Outcome run(const Program& program, bool compares, std::chrono::milliseconds timeout) {
  if (program.processes) return run_in_processes(program, compares, timeout);
  return run_in_threads(program, compares ? expected_of(program) : AllExpected(), timeout);
}

std::string all_errors(const Outcome& outcome) {
  std::string text;
  for (size_t rank = 0; rank < kMaxRanks; ++rank)
    if (!outcome.errors[rank].empty()) text += "rank " + std::to_string(rank) + ": " + outcome.errors[rank] + "\n";
  return text;
}

std::string fault_of_legal(const Program& program) {
  const Outcome outcome = run(program, /*compares=*/true, kTimeout);
  if (const std::string errors = all_errors(outcome); !errors.empty()) return "a legal program was refused:\n" + errors;
  for (int rank = 0; rank < program.ranks; ++rank)
    if (const auto& text = outcome.differences[static_cast<size_t>(rank)]; !text.empty())
      return "rank " + std::to_string(rank) + " computed something else than one rank does:\n" + text;
  return {};
}

std::string fault_of_illegal(const Program& program, const Judgement& judgement, std::chrono::milliseconds timeout) {
  const Outcome outcome = run(program, /*compares=*/false, timeout);
  const std::string errors = all_errors(outcome);
  for (int rank = 0; rank < program.ranks; ++rank)
    if (outcome.errors[static_cast<size_t>(rank)].empty())
      return "rank " + std::to_string(rank) + " went on in spite of " + judgement.rule + "\n" + errors;
  const bool named = std::any_of(judgement.causes.begin(), judgement.causes.end(),
                                 [&](const std::string& cause) { return errors.find(cause) != std::string::npos; });
  return named ? "" : "no error names the cause: " + judgement.rule + "\n" + errors;
}

}  // namespace

std::string fault_of(const Program& program, const Judgement& judgement) {
  if (judgement.verdict == Verdict::kLegal) return fault_of_legal(program);
  const std::string fault = fault_of_illegal(program, judgement, kShortTimeout);
  return fault.empty() ? fault : fault_of_illegal(program, judgement, kTimeout);
}

}  // namespace lockstep::fuzz
