// SPDX-License-Identifier: Apache-2.0
#include "cli/compare/settings.h"

namespace lockstep::compare {
namespace {

const char* name_of(Links links) {
  if (links == Links::kNone) return "none";
  return links == Links::kShaped ? "shaped" : "loopback";
}

}  // namespace

Json to_json(const Settings& settings) {
  return {{"version", LOCKSTEP_VERSION},
          {"experiment", settings.experiment},
          {"model", settings.model},
          {"data", settings.data},
          {"batch_size", settings.batch_size},
          {"batch_per_device", settings.batch_per_device},
          {"threads", settings.threads},
          {"epochs", settings.budget.epochs},
          {"samples", settings.budget.samples},
          {"steps", settings.budget.steps},
          {"budget_seconds", settings.budget.seconds},
          {"devices", settings.devices},
          {"strategies", settings.strategies},
          {"vary", settings.vary},
          {"seeds", settings.seeds},
          {"order_seed", settings.order_seed},
          {"trace", settings.trace},
          {"train", settings.train},
          {"links", name_of(settings.links)},
          {"megabits_per_second", settings.links == Links::kShaped ? settings.link.megabits_per_second : 0}};
}

}  // namespace lockstep::compare
