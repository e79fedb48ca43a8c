// SPDX-License-Identifier: Apache-2.0
#include "tools/plan/forecast.h"

#include <cmath>
#include <numeric>
#include <tuple>

#include "lockstep/base/text.h"
#include "lockstep/strategy/strategies.h"

namespace lockstep::plan {
namespace {

// The way from the beginning to the end of a schedule that allows no delay: back from the last activity, each time to the one that
// ended last of those it waited for. Its seconds by the kind of work.
std::map<Kind, double> critical_path(const Schedule& schedule, const Outcome& outcome) {
  const auto end_of = [&](int activity) { return outcome.activities[activity].end; };
  std::map<Kind, double> seconds;
  int activity = *std::ranges::max_element(schedule.ends.back(), {}, end_of);
  for (;;) {
    const Activity& what = schedule.simulation.activities[activity];
    const Times& times = outcome.activities[activity];
    seconds[what.kind] += times.end - times.begin;
    if (what.after.empty()) return seconds;
    activity = *std::ranges::max_element(what.after, {}, end_of);
  }
}

std::string bound_of(const std::map<Kind, double>& path, double all) {
  constexpr const char* kNamesOfKinds[] = {"waiting", "computing", "memory", "link"};
  const auto most = std::ranges::max_element(path, {}, &std::pair<const Kind, double>::second);
  return concat(kNamesOfKinds[static_cast<size_t>(most->first)], " ", fixed(100 * most->second / all, 0), " %");
}

// Half the difference between the mean of the slower half of single steps and that of the faster half.
double half_spread(const std::vector<double>& sorted) {
  if (sorted.empty()) return 0;
  const auto half = (std::ssize(sorted) + 1) / 2;
  const double slow = std::accumulate(sorted.end() - half, sorted.end(), 0.0);
  const double fast = std::accumulate(sorted.begin(), sorted.begin() + half, 0.0);
  return (slow - fast) / to_double(half) / 2;
}

// Steps after which all later ones are alike: with averaging a whole round, from average to average.
int steps_of_round(const Choice& choice) {
  return choice.kind == StrategyKind::kAveraging ? to_int(choice.averaging.every) : 1;
}

// ---- Memory

// A rank's own bytes by its samples: Line::per_byte is what each sample adds.
Line memory_by_samples(const Profile& profile) {
  std::vector<SizedTime> points;
  for (const SizedMemory& each : profile.memory_of_rank)
    points.push_back({.bytes = to_double(each.samples), .seconds = each.bytes});
  return line_through(points);
}

// The ends of connections on a machine: each process has one to each other process, the first ones of each machine have one to
// their counterparts, and each link of a store between a worker and a server has two.
double memory_of_connections(const Profile& profile, const Target& target, const Choice& choice) {
  if (target.machines == 1) return 0;
  const double servers = choice.has_servers() ? choice.servers : 0, machines = target.machines;
  const double workers =
      choice.has_device_threads() && choice.kind != StrategyKind::kPipeline ? machines : target.all_devices();
  const double processes = servers + workers;
  const double in_step = machines * std::floor(processes / machines);  // as many on each machine
  const double links = servers * workers * (1 - 1 / machines);         // those inside a machine are shared memory
  return (processes * (processes - 1) + in_step * (machines - 1) + 4 * links) * profile.connection_bytes / machines;
}

// A process has what one has of its own that trains with no samples, without its replica.
double memory_of_processes(const Profile& profile, const Target& target, const Choice& choice) {
  const Line rank = memory_by_samples(profile);
  return held_bytes(
             {.options = choice.options({}),
              .machines = target.machines,
              .devices = target.devices,
              .stages = choice.stages,
              .process = std::max(profile.idle_bytes, rank.fixed - 2 * profile.parameter_bytes - profile.state_bytes),
              .parameters = profile.parameter_bytes,
              .state = profile.state_bytes,
              .activations = rank.per_byte * to_double(target.batch) / target.machines})
      .sum();
}

std::string not_measured(const Profile& profile, const Target& target, const Choice& choice) {
  std::vector<std::string> what;
  const auto& points = profile.curves.front().points;
  const int parts = choice.kind == StrategyKind::kPipeline ? choice.parts_of_batch() : target.all_devices();
  const double samples = to_double(target.batch) / parts;
  if (samples < 0.9 * to_double(points.front().samples) || samples > to_double(points.back().samples))
    what.push_back(concat(fixed(samples, 0), " samples on a device"));
  if (target.devices > profile.cores) what.push_back("more devices than cores");
  if (target.cores > 0 && target.cores != profile.cores) what.push_back("another number of cores");
  if (target.machines > 1) what.push_back("links");
  return join(what, ", ");
}

}  // namespace

int steps_for(const Choice& choice) {
  constexpr int kLeast = 4;
  const int round = steps_of_round(choice);
  return std::max(2, (kLeast + round - 1) / round) * round;
}

// Counted is from the end of one round to the end of the last one, so that devices need not be in step.
double seconds_of_step(const Choice& choice, const Schedule& schedule, const Outcome& outcome) {
  const auto end_of = [&](const Ids& activities) {
    double end = 0;
    for (const int activity : activities) end = std::max(end, outcome.activities[activity].end);
    return end;
  };
  const int warm_up = steps_of_round(choice);
  return (end_of(schedule.ends.back()) - end_of(schedule.ends[warm_up - 1])) / (schedule.ends.size() - warm_up);
}

Forecast forecast(const Profile& profile, const Target& wanted, const Choice& choice) {
  const Target target = choice.on(wanted);
  const Schedule made = schedule(profile, target, choice, steps_for(choice));
  const Outcome outcome = made.simulation.run();
  auto path = critical_path(made, outcome);
  const double step = seconds_of_step(choice, made, outcome);
  const double steps_of_epoch = std::ceil(fraction(profile.dataset, target.batch));
  return {.choice = choice,
          .step = step,
          .uncertain = half_spread(profile.spread) * path[Kind::kComputing] / outcome.end,
          .not_measured = not_measured(profile, target, choice),
          .bound = bound_of(path, outcome.end),
          .link_bytes = made.sent_bytes,
          .memory = profile.common_bytes + memory_of_processes(profile, target, choice) +
                    memory_of_connections(profile, target, choice),
          .epochs = steps_of_epoch * step * to_double(target.epochs)};
}

std::vector<Forecast> forecast_all(const Profile& profile, const Target& target) {
  require_possible(target);
  std::vector<Forecast> all;
  for (const Choice& choice : choices_for(target, to_int(profile.pieces.size())))
    all.push_back(forecast(profile, target, choice));
  std::ranges::stable_sort(all, {}, &Forecast::step);
  return all;
}

std::vector<Scaled> forecast_scaling(const Profile& profile, Target target, const std::vector<int>& cores) {
  std::vector<Scaled> all;
  for (const int count : cores) {
    std::map<std::pair<StrategyKind, int>, Scaled> fastest;  // by strategy, and ranks of ddp
    target.cores = count;
    for (int ranks = 1; ranks <= std::min<int64_t>(count, target.batch); ++ranks) {
      if (count % ranks != 0) continue;
      target.devices = ranks;
      for (const Choice& choice : choices_for(target, to_int(profile.pieces.size()))) {
        if (!choice.exact() || choice.has_servers() || choice.on(target).devices != ranks) continue;
        const Scaled one{count, ranks, forecast(profile, target, choice)};
        const std::pair row(choice.kind, choice.kind == choice.kDdp ? ranks : 0);
        Scaled& best = fastest.try_emplace(row, one).first->second;
        if (one.forecast.step < best.forecast.step) best = one;
      }
    }
    for (const auto& [row, each] : fastest) all.push_back(each);
  }
  return all;
}

const Forecast& best_of(const std::vector<Forecast>& forecasts, bool inexact) {
  constexpr double kAsFast = 1.05;
  std::vector<const Forecast*> meant;
  for (const Forecast& each : forecasts)
    if (inexact || each.choice.exact()) meant.push_back(&each);
  if (meant.empty())
    throw UsageError(
        {.what = "no strategy for this target", .next = "give other --machines or --devices, or --inexact"});
  const double fastest = (*std::ranges::min_element(meant, {}, &Forecast::step))->step;
  std::erase_if(meant, [&](const Forecast* each) { return each->step > kAsFast * fastest; });
  const auto how_complex = [](const Forecast* each) {
    const Choice& choice = each->choice;
    return std::tuple(choice.has_servers() ? choice.servers : 0,
                      choice.kind == StrategyKind::kPipeline ? choice.parts_of_batch() : 1, each->step);
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
    if (&other != &best && (inexact || other.choice.exact()) &&
        (other.choice.kind != best.choice.kind || other.choice.store != best.choice.store))
      return concat(text, other.step < best.step ? "; hardly faster is " : "; next is ", other.choice.name(), " with ",
                    about(other));
  return text;
}

Recordings timeline_of(const Profile& profile, const Target& target, const Choice& choice) {
  constexpr int kShown = 3;
  const Schedule made = schedule(profile, target, choice, kShown);
  const Outcome outcome = made.simulation.run();
  const auto ns = [](double seconds) { return std::lround(seconds * 1e9); };
  Recordings recordings;
  for (int actor = 0; actor < made.actors.size(); ++actor) {
    trace::Recording recording{.process = {.rank = actor, .ranks = made.actors.size(), .finished = 1}};
    const std::string name = concat("forecast: ", made.actors[actor]);
    name.copy(recording.process.host.data(), recording.process.host.size() - 1);
    for (int i = 0; i < outcome.activities.size(); ++i) {
      const Activity& activity = made.simulation.activities[i];
      const Times& times = outcome.activities[i];
      if (activity.actor != actor || times.end <= times.begin) continue;
      recording.events.push_back({.name = activity.name, .thread = 1, .begin = ns(times.begin), .end = ns(times.end)});
    }
    recordings.push_back(std::move(recording));
  }
  return recordings;
}

}  // namespace lockstep::plan
