#include "bench/strategies/cases.h"

namespace lockstep::bench {
namespace {

// Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms" (2009): the least there is.
double all_reduced(int workers, int) { return 2.0 * (workers - 1) / workers; }

}  // namespace

// One more strategy is one more line.
const std::vector<StrategyCase>& strategy_cases() {
  static const std::vector<StrategyCase> cases{
      {"ddp", "2(N-1)/N * K", {"--strategy", "ddp"}, 0, all_reduced},
      {"ddp ring", "2(N-1)/N * K", {"--strategy", "ddp", "--algorithm", "ring"}, 0, all_reduced},
  };
  return cases;
}

}  // namespace lockstep::bench
