// SPDX-License-Identifier: Apache-2.0
// tests/recovery/jobs.h: runs of fragile_task that lose ranks, and what is compared with the undisturbed run.
#pragma once

#include <map>
#include <string>
#include <vector>

#include <torch/types.h>

#include "tests/launch/child.h"
#include "tests/train/command.h"

namespace lockstep::testing {

constexpr int kStepsPerEpoch = 6;
constexpr int kEpochs = 3;

// What a run has come to: the tensors of its last checkpoint (parameters, optimizer state, buffers, generators), and
// the loss of every step.
struct Outcome {
  std::map<std::string, torch::Tensor> tensors;
  std::map<int, double> losses;
};

struct Job {
  Words options;             // of the training command
  std::string faults;        // LOCKSTEP_FAULT
  std::string program_does;  // FRAGILE
  int ranks = 2;
  int max_restarts = 2;
};

// The command of a job that leaves its metrics and checkpoints in `folder`.
Words command_of(const Job& job, const TempFolder& folder);
Outcome outcome_in(const TempFolder& folder);  // throws if there is no checkpoint

// The first difference, as text; empty: there is none.
std::string difference(const Outcome& one, const Outcome& other);

// How often `part` is in `text`.
int count(const std::string& text, const std::string& part);

}  // namespace lockstep::testing
