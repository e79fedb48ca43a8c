// SPDX-License-Identifier: Apache-2.0
#include "tests/recovery/jobs.h"

#include <stdexcept>

#include "lockstep/checkpoint/checkpoint_folder.h"
#include "lockstep/checkpoint/safetensors.h"

namespace lockstep::testing {

Words command_of(const Job& job, const TempFolder& folder) {
  std::map<std::string, std::string> variables = {{"ASAN_OPTIONS", "detect_leaks=0"}};
  if (!job.faults.empty()) variables["LOCKSTEP_FAULT"] = job.faults;
  if (!job.program_does.empty()) variables["FRAGILE"] = job.program_does;
  const Words program = {FRAGILE_TASK,
                         "--data",
                         concat("synthetic:", 32 * kStepsPerEpoch, "x1x28x28?val=0.25"),
                         "--batch-size",
                         "24",
                         "--epochs",
                         std::to_string(kEpochs),
                         "--threads",
                         "1",
                         "--seed",
                         "5",
                         "--ranks",
                         std::to_string(job.ranks),
                         "--max-restarts",
                         std::to_string(job.max_restarts),
                         "--checkpoint-dir",
                         folder.file("checkpoints"),
                         "--metrics",
                         folder.file("metrics.jsonl"),
                         "--quiet"};
  return with_variables(variables, program + job.options);
}

Outcome outcome_in(const TempFolder& folder) {
  const auto newest = CheckpointFolder(folder.file("checkpoints")).load_newest();
  if (!newest) throw std::runtime_error("no checkpoint was written");
  Outcome outcome{.tensors = load_safetensors(newest->path).tensors};
  for (const auto& line : metrics_in(folder.file("metrics.jsonl")))
    if (line["event"] == "step") outcome.losses[line["step"]] = line["loss"];
  return outcome;
}

std::string difference(const Outcome& one, const Outcome& other) {
  for (const auto& [name, tensor] : one.tensors) {
    const auto found = other.tensors.find(name);
    if (found == other.tensors.end()) return concat("no ", name);
    if (!torch::equal(found->second, tensor)) return concat("other values in ", name);
  }
  if (one.tensors.size() != other.tensors.size()) return "more tensors";
  for (const auto& [step, loss] : one.losses) {
    const auto found = other.losses.find(step);
    if (found == other.losses.end()) return concat("no loss of step ", step);
    if (found->second != loss) return concat("another loss of step ", step);
  }
  return {};
}

int count(const std::string& text, const std::string& part) {
  int count = 0;
  for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++count;
  return count;
}

}  // namespace lockstep::testing
