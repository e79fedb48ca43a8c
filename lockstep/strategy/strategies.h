// SPDX-License-Identifier: Apache-2.0
// strategy/strategies.h: makes each strategy; the table in strategy.cc lists them. What a strategy does is described at
// the top of its source.
//
// Ranks:   all ranks call
#pragma once

#include "lockstep/strategy.h"

namespace lockstep {

std::unique_ptr<Strategy> make_ddp(const World& world, const Task& task, const StrategyOptions& options);
std::unique_ptr<Strategy> make_towers(const World& world, const Task& task, const StrategyOptions& options);
std::unique_ptr<Strategy> make_data_parallel(const World& world, const Task& task, const StrategyOptions& options);
std::unique_ptr<Strategy> make_averaging(const World& world, const Task& task, const StrategyOptions& options);

// Throws UsageError: a model that can't be cut, stages that do not divide the devices; with several ranks also several
// devices in a rank, or clipping by norm (no rank has the norm of all gradients). MismatchError: the ranks' models
// differ.
std::unique_ptr<Strategy> make_pipeline(const World& world, const Task& task, const StrategyOptions& options);

// ---- Memory, for a forecast

// A run that is planned. Bytes.
struct PlannedRun {
  StrategyOptions options{};
  int machines = 1;
  int devices = 1;         // of each machine
  int stages = 1;          // pipeline
  double process = 0;      // of a process without a model
  double parameters = 0;   // of the model; gradients have as many
  double state = 0;        // of the optimizer
  double activations = 0;  // of a machine's part of the batch
};

// Bytes that training holds on one machine.
struct HeldBytes {
  double processes = 0;
  double parameters = 0;
  double state = 0;
  double gradients = 0;
  double activations = 0;
  double buckets = 0;

  double sum() const { return processes + parameters + state + gradients + activations + buckets; }
};

HeldBytes bytes_of_ddp(const PlannedRun& run);
HeldBytes bytes_of_towers(const PlannedRun& run);
HeldBytes bytes_of_data_parallel(const PlannedRun& run);
HeldBytes bytes_of_kvstore(const PlannedRun& run);
HeldBytes bytes_of_averaging(const PlannedRun& run);
HeldBytes bytes_of_pipeline(const PlannedRun& run);

// Bytes of the strategy options.kind.
HeldBytes held_bytes(const PlannedRun& run);

}  // namespace lockstep
