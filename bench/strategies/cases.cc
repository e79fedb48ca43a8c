// SPDX-License-Identifier: Apache-2.0
#include "bench/strategies/cases.h"

#include <algorithm>

namespace lockstep::bench {
namespace {

// Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms" (2009): the least there is.
double all_reduced(int workers, int) { return 2.0 * (workers - 1) / workers; }

// Li et al., "Scaling distributed machine learning with the parameter server" (OSDI 2014): each worker gives K and
// takes K; a server has its share of the keys. With more servers than workers a worker's own link is the busiest.
double served(int workers, int servers) { return std::max(1.0, static_cast<double>(workers) / servers); }

// One more strategy is one more line.
std::vector<StrategyCase> all_cases() {
  const auto store = [](const char* servers) {
    return std::vector<std::string>{"--strategy",    "kvstore", "--kvstore", "dist_sync",
                                    "--split-above", "10000",   "--servers", servers};
  };
  return {
      {"ddp", "2(N-1)/N * K", {"--strategy", "ddp"}, 0, all_reduced},
      {"ddp ring", "2(N-1)/N * K", {"--strategy", "ddp", "--algorithm", "ring"}, 0, all_reduced},
      {"1 server", "N * K", store("1"), 1, served},
      {"2 servers", "N/2 * K", store("2"), 2, served},
      {"4 servers", "N/4 * K", store("4"), 4, served},
  };
}

}  // namespace

const std::vector<StrategyCase>& strategy_cases() {
  static const std::vector<StrategyCase> cases = all_cases();
  return cases;
}

}  // namespace lockstep::bench
