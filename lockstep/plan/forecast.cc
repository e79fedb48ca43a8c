// SPDX-License-Identifier: Apache-2.0
#include "lockstep/plan/forecast.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <tuple>

#include "lockstep/base/text.h"
#include "lockstep/base/to_size.h"
#include "lockstep/error.h"
#include "lockstep/plan/schedules.h"
#include "lockstep/strategy/option_names.h"
#include "lockstep/strategy/strategies.h"

namespace lockstep::plan {
namespace {

constexpr int kSteps = 16;
constexpr int kManyDevices = 16, kStepsOfMany = 3;

struct Simulated {
  double step = 0;
  std::string bound;
  double link_bytes = 0;
};

// Of many devices fewer: they have as many chances to be slow. Of averaging always whole rounds, from average to average.
int steps_for(const Target& target, const Choice& choice) {
  if (choice.method != Method::kAveraging) return target.all_devices() > kManyDevices ? kStepsOfMany : kSteps;
  return (kSteps + choice.average_every - 1) / choice.average_every * choice.average_every;
}

const char* kind_of(const Activity& activity, const Schedule& schedule) {
  const auto uses = [&](const std::vector<int>& resources) {
    return std::ranges::any_of(activity.uses, [&](int one) { return std::ranges::count(resources, one) > 0; });
  };
  if (uses(schedule.links)) return "link";
  if (uses(schedule.memory) || uses(schedule.updates)) return "memory";
  return uses(schedule.cores) ? "computing" : "waiting";
}

// What most of the time goes to on the way from the beginning to the end that allows no delay: back from the last activity, each
// time to the one that ended last of those it waited for.
std::string bound_of(const Schedule& schedule, const Outcome& outcome) {
  const auto end_of = [&](int activity) { return outcome.activities[to_size(activity)].end; };
  std::map<std::string, double> seconds;
  int activity = *std::ranges::max_element(schedule.ends.back(), {}, end_of);
  for (;;) {
    const Activity& what = schedule.simulation.activities()[to_size(activity)];
    const Times& times = outcome.activities[to_size(activity)];
    seconds[kind_of(what, schedule)] += times.end - times.begin;
    if (what.after.empty()) break;
    activity = *std::ranges::max_element(what.after, {}, end_of);
    seconds["waiting"] += times.begin - end_of(activity);  // at a gate
  }
  const auto most = std::ranges::max_element(seconds, {}, &std::pair<const std::string, double>::second);
  return concat(most->first, " ", fixed(100 * most->second / outcome.end, 0), " %");
}

// The mean over all steps but the first: then one step's end is the next one's beginning also where devices are not in
// step.
Simulated simulate(const Profile& profile, const Target& target, const Choice& choice, Luck luck) {
  const int steps = steps_for(target, choice);
  const bool skips_first = choice.method != Method::kAveraging;
  const Schedule made = schedule(profile, target, choice, steps + (skips_first ? 1 : 0), luck);
  const Outcome outcome = made.simulation.run();
  double first = 0, last = 0;
  for (const int activity : made.ends.front()) first = std::max(first, outcome.activities[to_size(activity)].end);
  for (const int activity : made.ends.back()) last = std::max(last, outcome.activities[to_size(activity)].end);
  return {.step = (last - (skips_first ? first : 0)) / steps,
          .bound = bound_of(made, outcome),
          .link_bytes = made.sent_bytes};
}

// ---- Memory

// A rank's own bytes by its samples: Line::per_byte is what each sample adds.
Line memory_by_samples(const Profile& profile) {
  std::vector<SizedTime> points;
  for (const SizedMemory& each : profile.memory_of_rank)
    points.push_back({.bytes = static_cast<double>(each.samples), .seconds = each.bytes});
  return line_through(points);
}

// Of the ends of connections on a machine: each process has one to each other process, the first ones of each machine have one to
// their counterparts, and a store has links between its workers and servers.
double memory_of_connections(const Profile& profile, const Target& target, const Choice& choice) {
  if (target.machines == 1) return 0;
  const double servers = choice.has_servers() ? choice.servers : 0, machines = target.machines;
  const double workers =
      choice.has_device_threads() && choice.method != Method::kPipeline ? machines : target.all_devices();
  const double processes = servers + workers;
  const double in_step = machines * std::floor(processes / machines);  // as many on each machine
  const double links = servers * workers * (1 - 1 / machines);         // those inside a machine are shared memory
  return ((processes * (processes - 1) + in_step * (machines - 1)) * profile.connection_bytes +
          2 * links * profile.store_link_bytes) /
         machines;
}

StrategyOptions options_of(const Choice& choice) {
  StrategyOptions options;
  options.compression.kind = choice.compression;
  options.kvstore.servers = choice.servers;
  options.pipeline = {.micro_batches = choice.micro_batches, .schedule = choice.order};
  if (choice.update_on_cpu) options.towers.update = UpdatePlace::kCpu;
  const auto is = [&](StrategyKind kind, KVStoreKind store = KVStoreKind::kLocal) {
    options.kind = kind;
    options.kvstore.kind = store;
  };
  switch (choice.method) {
    case Method::kSingle: is(StrategyKind::kSingle); break;
    case Method::kDdp: is(StrategyKind::kDdp); break;
    case Method::kTowers: is(StrategyKind::kTowers); break;
    case Method::kDataParallel: is(StrategyKind::kDataParallel); break;
    case Method::kStoreLocal: is(StrategyKind::kKVStore); break;
    case Method::kStoreSync: is(StrategyKind::kKVStore, KVStoreKind::kDistSync); break;
    case Method::kStoreAsync: is(StrategyKind::kKVStore, KVStoreKind::kDistAsync); break;
    case Method::kStoreBounded: is(StrategyKind::kKVStore, KVStoreKind::kDistBounded); break;
    case Method::kAveraging: is(StrategyKind::kAveraging); break;
    case Method::kPipeline: is(StrategyKind::kPipeline); break;
  }
  return options;
}

// A process has what one has of its own that trains with no samples, without its replica.
double memory_of_processes(const Profile& profile, const Target& target, const Choice& choice) {
  const Line rank = memory_by_samples(profile);
  const auto parameters = static_cast<double>(profile.parameter_bytes),
             state = static_cast<double>(profile.state_bytes);
  PlannedRun run{.options = options_of(choice),
                 .machines = target.machines,
                 .devices = target.devices,
                 .stages = choice.stages,
                 .process = std::max(profile.idle_bytes, rank.fixed - 2 * parameters - state),
                 .parameters = parameters,
                 .state = state,
                 .activations = rank.per_byte * static_cast<double>(target.batch) / target.machines};
  if (choice.compression == Compression::kTwoBit || choice.compression == Compression::kTopK)
    run.sent_share = compression_for(profile, name_of(choice.compression)).sent;
  return held_bytes(run).sum();
}

// With what they share, libraries above all.
double memory_of(const Profile& profile, const Target& target, const Choice& choice) {
  const int machines = target.on_one_machine ? target.machines : 1;
  return profile.common_bytes +
         machines * (memory_of_processes(profile, target, choice) + memory_of_connections(profile, target, choice));
}

std::string not_measured(const Profile& profile, const Target& target, const Choice& choice) {
  std::vector<std::string> what;
  const auto& points = profile.curves.front().points;
  const int parts = choice.method == Method::kPipeline ? choice.parts_of_batch() : target.all_devices();
  const double samples = static_cast<double>(target.batch) / parts;
  if (samples < 0.9 * static_cast<double>(points.front().samples) ||
      samples > static_cast<double>(points.back().samples))
    what.push_back(concat(fixed(samples, 0), " samples on a device"));
  if (target.devices > profile.cores) what.push_back("more devices than cores");
  if (target.cores > 0 && target.cores != profile.cores) what.push_back("another number of cores");
  if (target.machines > 1) what.push_back("links");
  return join(what, ", ");
}

}  // namespace

Forecast forecast(const Profile& profile, const Target& target, const Choice& choice) {
  const Simulated middle = simulate(profile, target, choice, Luck::kAny);
  const bool varies = !profile.spread.empty();
  const double fast = varies ? simulate(profile, target, choice, Luck::kGood).step : middle.step;
  const double slow = varies ? simulate(profile, target, choice, Luck::kBad).step : middle.step;
  const double steps_of_epoch = std::ceil(static_cast<double>(profile.dataset) / static_cast<double>(target.batch));
  return {.choice = choice,
          .step = middle.step,
          .uncertain = std::abs(slow - fast) / 2 / middle.step,
          .not_measured = not_measured(profile, target, choice),
          .bound = middle.bound,
          .link_bytes = middle.link_bytes,
          .memory = memory_of(profile, target, choice),
          .epochs = steps_of_epoch * middle.step * static_cast<double>(target.epochs)};
}

double seconds_of_step(const Profile& profile, const Target& target, const Choice& choice) {
  return simulate(profile, target, choice, Luck::kAny).step;
}

std::vector<Forecast> forecast_all(const Profile& profile, const Target& target) {
  require_possible(target);
  std::vector<Forecast> all;
  for (const Choice& choice :
       choices_for(target, static_cast<int>(profile.pieces.size()), static_cast<double>(profile.parameter_bytes)))
    all.push_back(forecast(profile, target, choice));
  std::ranges::stable_sort(all, {}, &Forecast::step);
  return all;
}

const Forecast& best_of(const std::vector<Forecast>& forecasts, bool inexact) {
  constexpr double kAsFast = 1.05;
  std::vector<const Forecast*> meant;
  for (const Forecast& each : forecasts)
    if (inexact || each.choice.exact()) meant.push_back(&each);
  if (meant.empty()) throw UsageError({.what = "no strategy for this target"});
  const double fastest = (*std::ranges::min_element(meant, {}, &Forecast::step))->step;
  std::erase_if(meant, [&](const Forecast* each) { return each->step > kAsFast * fastest; });
  const auto how_complex = [](const Forecast* each) {
    const Choice& choice = each->choice;
    return std::tuple(choice.has_servers() ? choice.servers : 0,
                      choice.method == Method::kPipeline ? choice.parts_of_batch() : 1, each->step);
  };
  return **std::ranges::min_element(meant, {}, how_complex);
}

std::string reason(const std::vector<Forecast>& forecasts, bool inexact) {
  const Forecast& best = best_of(forecasts, inexact);
  const auto about = [](const Forecast& each) {
    return concat(human_seconds(each.step), " (± ", fixed(100 * each.uncertain, 0), " %)");
  };
  std::string text = concat(best.choice.name(), ": ", about(best), " a step, ", best.bound);
  for (const Forecast& other : forecasts)
    if (&other != &best && (inexact || other.choice.exact()) && other.choice.method != best.choice.method)
      return concat(text, other.step < best.step ? "; hardly faster is " : "; next is ", other.choice.name(), " with ",
                    about(other));
  return text;
}

Recordings timeline_of(const Profile& profile, const Target& target, const Choice& choice) {
  constexpr int kShown = 3;
  const Schedule made = schedule(profile, target, choice, kShown);
  const Outcome outcome = made.simulation.run();
  const auto ns = [](double seconds) { return static_cast<std::int64_t>(std::llround(seconds * 1e9)); };
  Recordings recordings;
  for (std::size_t actor = 0; actor < made.actors.size(); ++actor) {
    trace::Recording recording{.process = {.rank = static_cast<std::int32_t>(actor),
                                           .ranks = static_cast<std::int64_t>(made.actors.size()),
                                           .finished = 1}};
    const std::string name = concat("forecast: ", made.actors[actor]);
    name.copy(recording.process.host.data(), recording.process.host.size() - 1);
    for (std::size_t i = 0; i < outcome.activities.size(); ++i) {
      const Activity& activity = made.simulation.activities()[i];
      const Times& times = outcome.activities[i];
      if (activity.actor != static_cast<int>(actor) || times.end <= times.begin) continue;
      recording.spans.push_back({.name = activity.name, .begin = ns(times.begin), .end = ns(times.end), .thread = 1});
    }
    recordings.push_back(std::move(recording));
  }
  return recordings;
}

}  // namespace lockstep::plan
