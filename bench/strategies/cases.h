// SPDX-License-Identifier: Apache-2.0
// bench/strategies/cases.h: what `lockstep bench strategies` compares: ways to keep the replicas on several hosts equal,
// each with the bytes that the literature gives for it.
//
// Notation: N workers, a host each; S servers, a host each; K bytes of gradient.
//
// Threads: values
#pragma once

#include <string>
#include <vector>

namespace lockstep::bench {

struct StrategyCase {
  std::string name;                    // in tables and plots
  std::string formula;                 // of busiest_bytes, to print
  std::vector<std::string> arguments;  // of lockstep train: --strategy first
  int servers = 0;

  // In and out of the busiest host's link in one step, each direction, in K.
  double (*busiest)(int workers, int servers) = nullptr;
};

const std::vector<StrategyCase>& strategy_cases();

}  // namespace lockstep::bench
