// SPDX-License-Identifier: Apache-2.0
// tests/step_fuzz/strategy_program.h: random runs of the strategies: how many ranks and devices, which model, optimizer and
// batches; and what they compute, replayed on one device with plain libtorch in float64.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "lockstep/strategy.h"
#include "tests/step_fuzz/program.h"

namespace lockstep::fuzz {

struct StrategyProgram {
  uint64_t seed = 0;
  StrategyOptions options;
  int ranks = 1;                 // threads, each with options.devices
  int machines = 1;              // that the ranks count as, in turn
  std::vector<int> order{};      // dist_async, dist_bounded: which worker updates next
  TrainerPlan plan;              // rule, lr and weight decay, as the reference has them
  std::vector<int64_t> widths;   // of the model's layers: inputs, hidden ..., outputs
  std::vector<int64_t> batches;  // samples of the global batch of each step
  std::vector<double> rates;     // learning rate of each step
};

StrategyProgram random_strategy_program(uint64_t seed);

// dist_async or dist_bounded, with the least bound that lets workers 0, 1, 2 ... take turns.
StrategyProgram workers_in_turn(KVStoreKind kind, Rule rule, int workers, int devices);

std::string text_of(const StrategyProgram& program);
std::vector<std::string> features_of(const StrategyProgram& program);

// What the error has to name if the options do not go together; empty: they do.
std::string refusal_of(const StrategyProgram& program);

// What is wrong with its run; empty: nothing.
std::string fault_of(const StrategyProgram& program);

// The program with fewer steps, layers, devices and ranks that is still wrong.
StrategyProgram shortest(StrategyProgram program);

}  // namespace lockstep::fuzz
