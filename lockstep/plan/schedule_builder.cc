// SPDX-License-Identifier: Apache-2.0
#include "lockstep/plan/schedule_builder.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

#include "lockstep/base/text.h"

namespace lockstep::plan {

Builder::Builder(const Profile& profile, const Target& target, const Choice& choice, Luck luck)
    : profile_(profile), target_(target), choice_(choice), luck_(luck) {
  const int own_cores = target.cores > 0 ? target.cores : profile.cores;
  threads_ = std::max(1, own_cores / target.devices);
  seats_ = std::max(1, own_cores / threads_);
  for (int machine = 0; machine < target.machines; ++machine) add_machine(machine);
  for (int device = 0; device < devices(); ++device) add_actor(concat("device ", device));
  made_.devices = devices();
}

double Builder::samples_of(int device) const {
  const auto all = target_.batch, parts = static_cast<std::int64_t>(devices());
  return static_cast<double>(all / parts + (device < all % parts ? 1 : 0));
}

StepTimes Builder::alone(double samples) const {
  const Curve& measured = curve_for(profile_, 1, threads_);
  StepTimes times = times_for(measured, samples);
  if (measured.threads == threads_ || measured.threads == 1) return times;
  const StepTimes one =
      times_for(curve_for(profile_, 1, 1), samples);  // threads between one and all: evenly in logarithms
  const double share = std::log(threads_) / std::log(measured.threads);
  const auto between = [&](double from, double to) { return from <= 0 ? to : from * std::pow(to / from, share); };
  return {.samples = times.samples,
          .forward = between(one.forward, times.forward),
          .backward = between(one.backward, times.backward),
          .update = between(one.update, times.update)};
}

int Builder::add_actor(const std::string& name) {
  made_.actors.push_back(name);
  last_.push_back({});
  return static_cast<int>(last_.size()) - 1;
}

int Builder::compute(int actor, int machine, const std::string& name, double seconds, const Ids& after) {
  return add(actor, {.name = name, .work = seconds * luck(actor), .uses = {made_.cores[at(machine)]}, .after = after});
}

int Builder::touch(int actor, int machine, const std::string& name, double bytes, const Ids& after) {
  return add(actor, {.name = name, .work = bytes, .uses = {made_.memory[at(machine)]}, .after = after});
}

int Builder::send(int actor, int from, int to, const std::string& name, double bytes, const Ids& after) {
  if (from == to) return touch(actor, from, name, 4 * bytes, after);
  sent_[at(from)] += bytes;
  received_[at(to)] += bytes;
  return add(actor, {.name = name,
                     .delay = target_.link_latency + message_,
                     .work = bytes,
                     .uses = {out_[at(from)], in_[at(to)], wire_[at(from)], wire_[at(to)]},
                     .after = after});
}

int Builder::exchange(int actor, int machine, const std::string& name, double bytes, const Ids& after) {
  sent_[at(machine)] += bytes;
  received_[at(machine)] += bytes;
  return add(actor, {.name = name,
                     .delay = target_.link_latency + message_,
                     .work = bytes,
                     .uses = {out_[at(machine)], in_[at(machine)], wire_[at(machine)]},
                     .after = after});
}

int Builder::pass(int actor, int gate, int ticket, const Ids& after) {
  return add(actor, {.name = "wait", .after = after, .gate = gate, .ticket = ticket});
}

int Builder::meet(const Ids& actors, double seconds, const Ids& after) {
  Ids all = after;
  for (const int actor : actors) all.insert(all.end(), last_[at(actor)].begin(), last_[at(actor)].end());
  const int met = made_.simulation.add(Activity{.name = "wait", .delay = seconds, .after = all});
  for (const int actor : actors) last_[at(actor)] = {met};
  return met;
}

Ids Builder::all_devices() const {
  Ids ids(at(devices()));
  std::iota(ids.begin(), ids.end(), 0);
  return ids;
}

Ids Builder::devices_on(int machine) const {
  Ids ids(at(target_.devices));
  std::iota(ids.begin(), ids.end(), machine * target_.devices);
  return ids;
}

double Builder::update_bytes(int sources) const {
  const double state = static_cast<double>(profile_.state_bytes);
  const double one = 3 * parameter_bytes() + 2 * state;
  const double measured = update_seconds(curve_for(profile_, 1, 1)) * profile_.copy_speed.front();
  return measured * (one + (sources - 1) * parameter_bytes()) / one;
}

void Builder::forward_and_backward(int device) {
  const StepTimes times = alone(samples_of(device));
  compute(device, machine_of(device), "forward", times.forward);
  compute(device, machine_of(device), "backward", times.backward);
}

void Builder::end_step() {
  made_.ends.emplace_back();
  for (int device = 0; device < devices(); ++device)
    for (const int activity : last_[at(device)]) made_.ends.back().push_back(activity);
}

Schedule Builder::take() {
  const double steps = static_cast<double>(std::max<std::size_t>(1, made_.ends.size()));
  for (int machine = 0; machine < machines(); ++machine)
    made_.sent_bytes = std::max({made_.sent_bytes, sent_[at(machine)] / steps, received_[at(machine)] / steps});
  return std::move(made_);
}

int Builder::add(int actor, Activity activity) {
  activity.actor = actor;
  activity.after.insert(activity.after.end(), last_[at(actor)].begin(), last_[at(actor)].end());
  const int id = made_.simulation.add(std::move(activity));
  last_[at(actor)] = {id};
  return id;
}

void Builder::add_machine(int machine) {
  Simulation& simulation = made_.simulation;
  made_.cores.push_back(simulation.add(Resource{concat("cores of machine ", machine), core_speeds()}));
  made_.memory.push_back(simulation.add(Resource{concat("memory of machine ", machine), profile_.copy_speed}));
  out_.push_back(simulation.add(Resource{concat("link from machine ", machine), {target_.link_rate}}));
  in_.push_back(simulation.add(Resource{concat("link to machine ", machine), {target_.link_rate}}));
  made_.links.push_back(out_.back());
  made_.links.push_back(in_.back());
  const Line line = line_through(profile_.loopback);
  message_ = line.fixed;
  const double fastest = line.per_byte > 0 ? 1 / line.per_byte : 1e12;
  wire_.push_back(simulation.add(Resource{concat("sockets of machine ", machine), {fastest}}));
  sent_.push_back(0);
  received_.push_back(0);
}

// Work of one device a second while n compute: those that were measured at the same time hinder each other, and those
// that have no core take turns.
std::vector<double> Builder::core_speeds() const {
  const double samples = std::max(1.0, static_cast<double>(target_.batch) / devices());
  const auto seconds = [&](int at_once) {
    const StepTimes times = times_for(curve_for(profile_, at_once, 1), samples);
    return times.forward + times.backward;
  };
  const double most = std::max(1.0, seconds(profile_.cores) / seconds(1));  // of all cores at once
  std::vector<double> speeds;
  for (int n = 1; n <= seats_; ++n) {
    const double crowd =
        profile_.cores > 1 ? std::min(1.0, static_cast<double>(n * threads_ - 1) / (profile_.cores - 1)) : 0;
    const double slowdown = threads_ > 1 && seats_ == 1 ? 1 : 1 + (most - 1) * crowd;
    speeds.push_back(n / slowdown);
  }
  return speeds;
}

// A step's time on a device over the median, out of what was measured: by step and device, the same for every choice, so
// that choices are compared under the same luck. Multiples of irrational numbers spread evenly over all.
double Builder::luck(int device) const {
  const auto& spread = profile_.spread;
  if (spread.empty()) return 1;
  const std::size_t half = (spread.size() + 1) / 2;
  const std::size_t first = luck_ == Luck::kBad ? spread.size() - half : 0;
  const std::size_t count = luck_ == Luck::kAny ? spread.size() : half;
  const double place = 0.618034 * static_cast<double>(made_.ends.size()) + 0.414214 * device;
  return spread[first + static_cast<std::size_t>((place - std::floor(place)) * static_cast<double>(count))];
}

}  // namespace lockstep::plan
