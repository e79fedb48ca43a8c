// SPDX-License-Identifier: Apache-2.0
#include "cli/compare/plan.h"

#include <algorithm>
#include <random>
#include <set>

#include "lockstep/base/text.h"
#include "lockstep/error.h"

namespace lockstep::compare {
namespace {

std::vector<Case> chosen_cases(const Settings& settings, const Experiment& experiment) {
  if (settings.strategies.empty()) return experiment.cases;
  std::vector<Case> cases;
  for (const std::string& name : settings.strategies) {
    const auto found = std::ranges::find(experiment.cases, name, &Case::contender);
    cases.push_back(found == experiment.cases.end() ? Case{contender_named(name).name, {}} : *found);
  }
  return cases;
}

// --vary replaces the values of what an experiment varies. What it varies nowhere is varied everywhere.
void apply(const std::map<std::string, Words>& vary, std::vector<Case>& cases) {
  for (const auto& [option, values] : vary) {
    bool known = false;
    for (Case& each : cases)
      for (Varied& varied : each.varied)
        if (varied.option == option) {
          varied.values = values;
          known = true;
        }
    if (!known)
      for (Case& each : cases) each.varied.push_back({option, values});
  }
}

std::vector<Options> combinations(const Case& one) {
  std::vector<Options> all{{}};
  for (const auto& [option, values] : one.varied) {
    std::vector<Options> more;
    for (const Options& before : all)
      for (const std::string& value : values) {
        more.push_back(before);
        more.back()[option] = value;
      }
    all = std::move(more);
  }
  return all;
}

std::string label(const Options& varied) {
  std::string text;
  for (const auto& [option, value] : varied) text += concat("-", key_of(option), "=", value);
  std::ranges::replace(text, '/', '_');  // it is part of the name of a folder
  return text;
}

bool can_be(const Run& run) {
  int stages = 1;
  for (const Options& options : {run.contender.options, run.varied})
    if (const auto found = options.find("stages"); found != options.end()) parse_int(found->second, stages);
  if (run.contender.strategy == "pipeline" && (run.devices < 2 || (stages > 0 && run.devices % stages != 0)))
    return false;
  return run.devices <= run.contender.most_devices;
}

int batch_of(const Settings& settings, const Run& run) {
  int batch = settings.batch_per_device > 0 ? settings.batch_per_device * run.devices : settings.batch_size;
  if (const auto found = run.varied.find("batch-size"); found != run.varied.end()) parse_int(found->second, batch);
  return std::max(batch, 1);
}

// A run that ends otherwise has more epochs than it can make.
Words budget_of(const Settings& settings, int batch) {
  const Budget& budget = settings.budget;
  if (budget.epochs > 0) return {"--epochs", concat(budget.epochs)};
  Words words{"--epochs", "1000000"};
  const std::int64_t steps = budget.samples > 0 ? (budget.samples + batch - 1) / batch : budget.steps;
  if (steps > 0) words.insert(words.end(), {"--max-steps", concat(steps)});
  return words;
}

Words arguments_of(const Settings& settings, const Run& run) {
  const int batch = batch_of(settings, run);
  Options options{{"model", settings.model},
                  {"data", settings.data},
                  {"batch-size", concat(batch)},
                  {"threads", concat(settings.threads)},
                  {"strategy", run.contender.strategy},
                  {"seed", concat(run.seed)}};
  if (run.contender.most_devices > 1 && settings.links == Links::kNone) options["ranks"] = concat(run.devices);
  for (const Options& more : {run.contender.options, run.varied})
    for (const auto& [option, value] : more) options[option] = value;
  Words words;
  for (const auto& [option, value] : options) words.insert(words.end(), {"--" + option, value});
  for (const Words& more : {budget_of(settings, batch), settings.train, Words{"--quiet"}})
    words.insert(words.end(), more.begin(), more.end());
  return words;
}

Run run_of(const Settings& settings, const Case& one, const Options& varied, int devices, int seed) {
  Run run{.contender = contender_named(one.contender), .varied = varied, .devices = devices, .seed = seed};
  run.group = concat(one.contender, "-", devices, label(varied));
  run.name = concat(run.group, "-seed", seed);
  run.arguments = arguments_of(settings, run);
  return run;
}

void require_names(const std::vector<Run>& runs) {
  std::set<std::string> names;
  for (const Run& run : runs)
    if (!names.insert(run.name).second)
      throw UsageError({.what = concat("run ", run.name, " is asked for twice"),
                        .likely = "a seed, a strategy, a number of devices or a value of --vary is given twice",
                        .next = "give it once: repeats are other --seeds"});
  if (runs.empty())
    throw UsageError({.what = "there is nothing to run",
                      .likely =
                          "the strategies can't be trained on these numbers of devices: single takes 1, a pipeline "
                          "at least 2",
                      .next = "give other --strategies or --devices"});
}

}  // namespace

std::string key_of(std::string option) {
  std::ranges::replace(option, '-', '_');
  return option;
}

std::vector<Run> plan(const Settings& settings, const Experiment& experiment) {
  std::vector<Case> cases = chosen_cases(settings, experiment);
  apply(settings.vary, cases);
  std::vector<Run> runs;
  for (const Case& one : cases) {
    const bool alone = contender_named(one.contender).most_devices == 1;  // one device, whatever --devices says
    for (const Options& varied : combinations(one))
      for (const int devices : alone ? std::vector<int>{1} : settings.devices)
        for (const int seed : settings.seeds)
          if (const Run run = run_of(settings, one, varied, devices, seed); can_be(run)) runs.push_back(run);
  }
  require_names(runs);
  for (int number = 0; Run & run : runs) run.number = number++;
  return runs;
}

std::vector<Run> shuffled(std::vector<Run> runs, std::uint64_t seed) {
  std::mt19937_64 generator(seed);
  std::ranges::shuffle(runs, generator);
  return runs;
}

}  // namespace lockstep::compare
