// SPDX-License-Identifier: Apache-2.0
// strategy/strategies.h: makes each strategy; the table in strategy.cc lists them. What a strategy does is described at
// the top of its source.
//
// Ranks:   all ranks call
#pragma once

#include "lockstep/strategy.h"

namespace lockstep {

// Throw UsageError: what the options can't have. make_pipeline also: a model that can't be cut, stages that do not
// divide the devices; with several ranks also several devices in a rank, or clipping by norm (no rank has the norm of
// all gradients); and MismatchError: the ranks' models differ.
using MakeStrategy = std::unique_ptr<Strategy>(const World& world, const Task& task, const StrategyOptions& options);
MakeStrategy make_ddp, make_towers, make_data_parallel, make_kvstore_strategy, make_averaging, make_pipeline;

constexpr bool has_servers(KVStoreKind kind) { return kind >= KVStoreKind::kDistSync; }
constexpr bool averages_in_background(const AveragingOptions& options) {
  return options.delay > 0 || options.in == AverageIn::kInt8;
}
constexpr bool goes_on_without_workers(KVStoreKind kind) { return kind > KVStoreKind::kDistSync; }

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

using BytesOf = HeldBytes(const PlannedRun& run);
BytesOf bytes_of_ddp, bytes_of_towers, bytes_of_data_parallel, bytes_of_kvstore, bytes_of_averaging, bytes_of_pipeline;

// Bytes of the strategy options.kind.
HeldBytes held_bytes(const PlannedRun& run);

}  // namespace lockstep
