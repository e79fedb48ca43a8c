// SPDX-License-Identifier: Apache-2.0
#include "cli/report/metrics.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "lockstep/base/file.h"
#include "lockstep/base/text.h"
#include "lockstep/error.h"

namespace lockstep::report {
namespace {

constexpr int kFormat = 1;  // kMetricsFormat of lockstep/train/run_facts.h
constexpr std::size_t kPoints = 500;

struct Step {
  std::int64_t step = 0;
  double loss = 0;  // NaN: null in the file
  double seconds = 0;
  double samples = 0;
};

struct Epoch {
  std::int64_t last_step = 0;
  Json event;
};

struct Events {
  Json start = Json::object();
  Json run = Json::object();
  std::vector<Step> steps;
  std::vector<Epoch> epochs;
  std::int64_t good = 0;
  std::int64_t bad = 0;
  bool cut_off = false;  // in the midst of the last line
};

double number_of(const Json& event, const char* key) {
  return has_number(event, key) ? event.at(key).get<double>() : std::numeric_limits<double>::quiet_NaN();
}

// What an earlier attempt wrote from `step` on is void, its end too.
void go_back_to(std::int64_t step, Events& events) {
  std::erase_if(events.steps, [&](const Step& other) { return other.step >= step; });
  std::erase_if(events.epochs, [&](const Epoch& epoch) { return epoch.last_step >= step; });
  events.run = Json::object();
}

bool add_step(const Json& event, Events& events) {
  if (!has_number(event, "step") || !has_number(event, "seconds") || !has_number(event, "samples")) return false;
  const Step step{.step = event.at("step").get<std::int64_t>(),
                  .loss = number_of(event, "loss"),
                  .seconds = number_of(event, "seconds"),
                  .samples = number_of(event, "samples")};
  if (!events.steps.empty() && events.steps.back().step >= step.step) go_back_to(step.step, events);
  events.steps.push_back(step);
  return true;
}

bool add_event(const Json& event, Events& events, const std::string& file) {
  const std::string kind = text_of(event, "event");
  if (kind == "step") return add_step(event, events);
  if (kind == "start") {
    require_known_format(event, "format", kFormat, file);
    if (has_number(event, "step")) go_back_to(event.at("step").get<std::int64_t>(), events);
    events.start = event;
  } else if (kind == "epoch") {
    events.epochs.push_back({events.steps.empty() ? 0 : events.steps.back().step, event});
  } else if (kind == "run" || kind == "stop") {
    events.run = event;
  }
  return !kind.empty();
}

Events events_in(const std::string& content, const std::string& file) {
  Events events;
  std::vector<std::string> lines = split(content, '\n');
  const bool whole = lines.back().empty();
  if (whole) lines.pop_back();
  for (const std::string& line : lines) {
    if (add_event(parse(line), events, file))
      ++events.good;
    else if (!whole && &line == &lines.back())
      events.cut_off = true;
    else
      ++events.bad;
  }
  if (events.good > 0) return events;
  throw DataError({.what = concat(file, content.empty() ? " is empty" : " has no event of lockstep in it"),
                   .likely = content.empty() ? "the run died before its first step"
                                             : "another kind of file, or cut off in its first line",
                   .next = "give what `lockstep train --metrics FILE` has written"});
}

std::vector<std::string> missing_in(const Events& events) {
  std::vector<std::string> missing;
  const std::int64_t steps = events.steps.empty() ? 0 : events.steps.back().step + 1;
  if (events.cut_off) missing.emplace_back("the last line is cut off");
  if (events.bad > 0)
    missing.push_back(concat(events.bad, events.bad == 1 ? " line is" : " lines are", " damaged and left out"));
  if (events.run.empty())
    missing.push_back(concat("no end: the run died after ", steps, " steps, or is still going on"));
  if (events.start.empty()) missing.emplace_back("no command, machine and settings: an older lockstep has written it");
  return missing;
}

// ---- Points to draw

// The steps of a point. The band tells what the mean hides.
void add_point(Json& points, const Step* begin, const Step* end, double samples, double seconds) {
  double sum = 0, low = INFINITY, high = -INFINITY, time = 0, count = 0;
  for (const Step* step = begin; step != end; ++step) {
    time += step->seconds;
    count += step->samples;
    sum += step->loss;
    low = std::min(low, step->loss);
    high = std::max(high, step->loss);
  }
  points["step"].push_back((end - 1)->step);
  points["samples"].push_back(samples + count);
  points["seconds"].push_back(seconds + time);
  points["loss"].push_back(sum / static_cast<double>(end - begin));
  points["low"].push_back(low);
  points["high"].push_back(high);
  points["rate"].push_back(time > 0 ? count / time : NAN);
}

Json arrays(std::initializer_list<const char*> names) {
  Json all;
  for (const char* name : names) all[name] = Json::array();
  return all;
}

Json points_of(const std::vector<Step>& steps) {
  Json points = arrays({"step", "samples", "seconds", "loss", "low", "high", "rate"});
  const std::size_t each = (steps.size() + kPoints - 1) / kPoints;
  double samples = 0, seconds = 0;
  for (std::size_t at = 0; at < steps.size(); at += each) {
    const Step* begin = &steps[at];
    add_point(points, begin, begin + std::min(each, steps.size() - at), samples, seconds);
    samples = points["samples"].back();
    seconds = points["seconds"].back();
  }
  return points;
}

Json epochs_of(const Events& events) {
  const auto columns = {"train_loss", "val_loss", "val_accuracy", "samples_per_second", "epoch_seconds"};
  Json points = arrays(
      {"step", "samples", "seconds", "train_loss", "val_loss", "val_accuracy", "samples_per_second", "epoch_seconds"});
  double samples = 0, seconds = 0;
  auto step = events.steps.begin();
  for (const auto& [last_step, event] : events.epochs) {
    for (; step != events.steps.end() && step->step <= last_step; ++step) {
      samples += step->samples;
      seconds += step->seconds;
    }
    points["step"].push_back(last_step);
    points["samples"].push_back(samples);
    points["seconds"].push_back(seconds);
    for (const std::string name : columns)
      points[name].push_back(number_of(event, name == "epoch_seconds" ? "seconds" : name.c_str()));
  }
  return points;
}

// After the first few, which connect, order buckets and grow memory, as in the tables of `lockstep compare`.
Json speed_of(const std::vector<Step>& steps) {
  if (steps.empty()) return Json::object();
  std::vector<double> sorted;
  double seconds = 0, samples = 0;
  for (std::size_t i = std::min<std::size_t>(3, steps.size() - 1); i < steps.size(); ++i) {
    sorted.push_back(steps[i].seconds * 1e3);
    seconds += steps[i].seconds;
    samples += steps[i].samples;
  }
  std::ranges::sort(sorted);
  const std::size_t count = sorted.size();
  return {{"p50_ms", (sorted[(count - 1) / 2] + sorted[count / 2]) / 2},
          {"p95_ms", sorted[count * 95 / 100]},
          {"samples_per_second", seconds > 0 ? samples / seconds : NAN}};
}

}  // namespace

Json read_metrics(const std::filesystem::path& file) {
  const Events events = events_in(read_file(file), file.string());
  return {{"start", events.start},           {"run", events.run},           {"steps", points_of(events.steps)},
          {"speed", speed_of(events.steps)}, {"epochs", epochs_of(events)}, {"partial", missing_in(events)}};
}

}  // namespace lockstep::report
