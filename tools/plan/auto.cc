// SPDX-License-Identifier: Apache-2.0
#include "tools/plan/auto.h"

#include "tools/plan/forecast.h"

namespace lockstep::plan {

// A pipeline computes in the precision of its parameters.
std::string choose_strategy(Subject& subject, int devices, bool also_single) {
  auto all = forecast_all(measure(subject), {.devices = devices, .batch = subject.batch});
  const bool lower_precision = subject.strategy.precision != Precision::kFloat32;
  std::erase_if(all, [&](const Forecast& each) {
    const Choice& choice = each.choice;
    return !choice.exact() || choice.has_servers() || (!also_single && choice.kind == StrategyKind::kSingle) ||
           (lower_precision && choice.kind == StrategyKind::kPipeline);
  });
  subject.strategy = best_of(all).choice.options(subject.strategy);
  return reason(all);
}

}  // namespace lockstep::plan
