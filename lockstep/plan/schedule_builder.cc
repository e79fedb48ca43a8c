// SPDX-License-Identifier: Apache-2.0
#include "lockstep/plan/schedule_builder.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

#include "lockstep/base/text.h"
#include "lockstep/plan/wire.h"

namespace lockstep::plan {

Builder::Builder(const Profile& profile, const Target& target, const Choice& choice, Luck luck)
    : profile_(profile), target_(target), choice_(choice), luck_(luck) {
  const int own_cores = target.cores > 0 ? target.cores : profile.cores;
  const int sharing = target.on_one_machine ? target.all_devices() : target.devices;
  threads_ = target.sleeps ? 1 : std::max(1, own_cores / sharing);
  seats_ = std::max(1, own_cores / threads_);
  round_ = line_through(profile.loopback).fixed;
  work_ = work_of_messages(profile);
  for (int machine = 0; machine < target.machines; ++machine) add_machine(machine);
  add_seats();
  for (int device = 0; device < devices(); ++device) add_actor(concat("device ", device));
  made_.devices = devices();
}

double Builder::samples_of(int device) const {
  const auto all = target_.batch, parts = static_cast<std::int64_t>(devices());
  return static_cast<double>(all / parts + (device < all % parts ? 1 : 0));
}

// With one thread, and with all of them, it was measured; between the two it is taken evenly in logarithms.
StepTimes Builder::alone(double samples) const {
  const Curve& all = curve_alone(profile_, /*with_all_threads=*/true);
  const StepTimes one = times_for(curve_alone(profile_), samples);
  if (threads_ == 1 || all.threads == 1) return one;
  const StepTimes most = times_for(all, samples);
  const double share = std::min(1.0, std::log(threads_) / std::log(all.threads));
  const auto between = [share](double from, double to) { return from <= 0 ? to : from * std::pow(to / from, share); };
  return {.samples = one.samples,
          .forward = between(one.forward, most.forward),
          .backward = between(one.backward, most.backward),
          .update = between(one.update, most.update)};
}

int Builder::add_actor(const std::string& name) {
  made_.actors.push_back(name);
  last_.push_back({});
  return static_cast<int>(last_.size()) - 1;
}

// A device runs on its own cores, or takes turns with those that have the same one; a server where there is room.
Activity Builder::on_seat(int actor, Activity activity) const {
  if (actor < devices()) activity.uses.push_back(seats_of_devices_[to_size(actor)]);
  return activity;
}

int Builder::add_lock() { return made_.simulation.add(Resource{"lock", {1}}); }

int Builder::compute(int device, const std::string& name, double seconds, const Ids& after) {
  if (!target_.sleeps) return process(device, machine_of(device), name, seconds, after);
  const int sleep = made_.cores[to_size(machines() + device)];
  return add(device, {.name = name, .work = seconds, .uses = {sleep}, .after = after});
}

int Builder::process(int actor, int machine, const std::string& name, double seconds, const Ids& after) {
  return add(
      actor,
      on_seat(actor,
              {.name = name, .work = seconds * luck(actor), .uses = {made_.cores[to_size(machine)]}, .after = after}));
}

// In seconds of one core that nobody hinders, as all work inside a machine: what needs memory needs a core, too.
Activity Builder::passing(int machine, const std::string& name, double bytes, const Ids& after) const {
  return {.name = name,
          .work = bytes / profile_.copy_speed.front(),
          .uses = {made_.cores[to_size(machine)], made_.memory[to_size(machine)]},
          .after = after};
}

// Each further source is one more gradient to read, beside what one has: gradient, parameters and state in and out.
Activity Builder::updating(int machine, double share, int sources, const Ids& after) const {
  const double gradient = parameter_bytes(), one = 3 * gradient + 2 * static_cast<double>(profile_.state_bytes);
  const double more = one > 0 ? (sources - 1) * gradient / one : 0;
  return {.name = "update",
          .work = share * alone(1).update * (1 + more),
          .uses = {made_.cores[to_size(machine)], made_.updates[to_size(machine)]},
          .after = after};
}

int Builder::touch(int actor, int machine, const std::string& name, double bytes, const Ids& after) {
  return add(actor, on_seat(actor, passing(machine, name, bytes, after)));
}

int Builder::update(int actor, int machine, double share, int sources, const Ids& after) {
  return add(actor, on_seat(actor, updating(machine, share, sources, after)));
}

// Messages of one connection follow each other; the time that each is under way does not keep the next one waiting.
Builder::Message Builder::post(int actor, int from, int to, const std::string& name, double bytes, const Ids& after) {
  if (from == to) {
    const int copied = beside(actor, passing(from, name, 4 * bytes, after));
    return {copied, copied};
  }
  const MessageBytes wire = bytes_on_wire(bytes);
  sent_[to_size(from)] += wire.there;
  received_[to_size(to)] += wire.there;
  sent_[to_size(to)] += wire.back;
  received_[to_size(from)] += wire.back;
  const int left = beside(
      actor, {.name = name, .work = wire.there, .uses = {out_[to_size(from)], in_[to_size(to)]}, .after = after});
  const int under_way = join({left}, target_.link_latency + profile_.message);
  const Messages one_end{.seconds = profile_.message_work / 2, .bytes = bytes / 2, .on_wire = wire.there + wire.back};
  const auto is_worker = [&](int machine) {
    return !choice_.has_servers() || machine == (actor < devices() ? machine_of(actor) : to);
  };
  return {left,
          join({under_way, handle(from, is_worker(from), one_end, after), handle(to, is_worker(to), one_end, after)})};
}

int Builder::exchange(int actor, int machine, const std::string& name, const std::vector<double>& sizes,
                      const Ids& after) {
  const double others = machines() - 1;
  Messages handled{};
  double all = 0;
  for (const double bytes : sizes) {
    const MessageBytes wire = bytes_on_wire(bytes);
    all += others * (wire.there + wire.back);
    handled.seconds += others * work_.message;
    handled.bytes += others * bytes;
  }
  sent_[to_size(machine)] += all;
  received_[to_size(machine)] += all;
  handled.on_wire = 2 * all;
  const int carried = beside(actor, {.name = name,
                                     .delay = target_.link_latency + round_,
                                     .work = all,
                                     .uses = {out_[to_size(machine)], in_[to_size(machine)]},
                                     .after = after});
  return join({carried, handle(machine, /*is_worker=*/true, handled, after)});
}

int Builder::start_exchange(int machine, const Ids& after) {
  return handle(machine, /*is_worker=*/true, {.seconds = work_.start}, after);
}

int Builder::pass(int machine, double bytes, const Ids& after) {
  return beside(-1, passing(machine, "pass", bytes, after));
}

int Builder::pass_locked(int lock, int machine, double bytes, const Ids& after) {
  Activity activity = passing(machine, "copy", bytes, after);
  activity.uses.push_back(lock);
  return beside(-1, std::move(activity));
}

int Builder::update_locked(int lock, int machine, double share, const Ids& after) {
  Activity activity = updating(machine, share, 1, after);
  activity.uses.push_back(lock);
  return beside(-1, std::move(activity));
}

int Builder::join(const Ids& after, double seconds) { return beside(-1, {.delay = seconds, .after = after}); }

// On the core that a worker is bound to where it has one only; where a machine has several, on any of them.
int Builder::handle(int machine, bool is_worker, const Messages& what, const Ids& after) {
  const double seconds = what.seconds + what.bytes * work_.byte + what.on_wire * target_.work_of_link_byte / 2;
  Activity activity{.name = "messages", .work = seconds, .uses = {made_.cores[to_size(machine)]}, .after = after};
  if (is_worker && target_.on_one_machine) activity = on_seat(machine * target_.devices, std::move(activity));
  return beside(-1, std::move(activity));
}

int Builder::pass_gate(int actor, int gate, int ticket, const Ids& after) {
  return add(actor, {.name = "wait", .after = after, .gate = gate, .ticket = ticket});
}

int Builder::meet(const Ids& actors, double seconds, const Ids& after) {
  Ids all = after;
  for (const int actor : actors) all.insert(all.end(), last_[to_size(actor)].begin(), last_[to_size(actor)].end());
  const int met = made_.simulation.add(Activity{.name = "wait", .delay = seconds, .after = all});
  for (const int actor : actors) last_[to_size(actor)] = {met};
  return met;
}

Ids Builder::all_devices() const {
  Ids ids(to_size(devices()));
  std::iota(ids.begin(), ids.end(), 0);
  return ids;
}

Ids Builder::devices_on(int machine) const {
  Ids ids(to_size(target_.devices));
  std::iota(ids.begin(), ids.end(), machine * target_.devices);
  return ids;
}

void Builder::forward_and_backward(int device) {
  const StepTimes times = alone(samples_of(device));
  compute(device, "forward", times.forward);
  compute(device, "backward", times.backward);
}

void Builder::end_step() {
  made_.ends.emplace_back();
  for (int device = 0; device < devices(); ++device)
    for (const int activity : last_[to_size(device)]) made_.ends.back().push_back(activity);
}

Schedule Builder::take() {
  const double steps = static_cast<double>(std::max<std::size_t>(1, made_.ends.size()));
  for (int machine = 0; machine < machines(); ++machine)
    made_.sent_bytes =
        std::max({made_.sent_bytes, sent_[to_size(machine)] / steps, received_[to_size(machine)] / steps});
  return std::move(made_);
}

int Builder::add(int actor, Activity activity) {
  activity.actor = actor;
  activity.after.insert(activity.after.end(), last_[to_size(actor)].begin(), last_[to_size(actor)].end());
  const int id = made_.simulation.add(std::move(activity));
  last_[to_size(actor)] = {id};
  return id;
}

int Builder::beside(int actor, Activity activity) {
  activity.actor = actor;
  return made_.simulation.add(std::move(activity));
}

void Builder::add_machine(int machine) {
  Simulation& simulation = made_.simulation;
  if (machine == 0 || !target_.on_one_machine) {
    made_.cores.push_back(simulation.add(Resource{concat("cores of machine ", machine), speeds_of_cores()}));
    made_.memory.push_back(simulation.add(Resource{concat("memory of machine ", machine), speeds_of_copies()}));
    made_.updates.push_back(simulation.add(Resource{concat("updates on machine ", machine), speeds_of_updates()}));
  } else {
    for (Ids* const all : {&made_.cores, &made_.memory, &made_.updates}) all->push_back(all->front());
  }
  out_.push_back(simulation.add(Resource{concat("link from machine ", machine), {target_.link_rate}}));
  in_.push_back(simulation.add(Resource{concat("link to machine ", machine), {target_.link_rate}}));
  made_.links.push_back(out_.back());
  made_.links.push_back(in_.back());
  sent_.push_back(0);
  received_.push_back(0);
}

// As the launcher binds ranks, and Devices their threads, to cores.
void Builder::add_seats() {
  Ids seats;
  for (int i = 0; i < seats_ * (target_.on_one_machine ? 1 : machines()); ++i)
    seats.push_back(made_.simulation.add(Resource{concat("seat ", i), {1}}));
  for (int device = 0; device < devices(); ++device) {
    const int first = target_.on_one_machine ? 0 : machine_of(device) * seats_;
    const int number = target_.on_one_machine ? device : device % target_.devices;
    seats_of_devices_.push_back(seats[to_size(first + number % seats_)]);
    if (target_.sleeps) made_.cores.push_back(made_.simulation.add(Resource{concat("sleep of device ", device), {1}}));
  }
}

// How much longer a part of a step takes while that many work than alone; between what was measured, in a straight line.
double Builder::slowdown(int at_once, double (*part)(const StepTimes&)) const {
  const double samples = std::max(1.0, static_cast<double>(target_.batch) / devices());
  const auto in_one_process = [](const Curve& curve) { return curve.in_one_process; };
  const bool are_threads =
      choice_.has_device_threads() && !target_.on_one_machine && std::ranges::any_of(profile_.curves, in_one_process);
  double before = 1, slower = 1;
  for (const Curve& curve : profile_.curves) {
    if (curve.threads != 1 || curve.at_once == 1 || curve.in_one_process != are_threads) continue;
    const double alone = part(times_for(profile_.curves.front(), samples));
    const double found = alone > 0 ? std::max(slower, part(times_for(curve, samples)) / alone) : 1;
    if (at_once <= curve.at_once) return slower + (found - slower) * (at_once - before) / (curve.at_once - before);
    before = curve.at_once;
    slower = found;
  }
  return slower;
}

// Seconds of work of one device alone, done in a second while n work: those at the same time hinder each other, as the threads of
// one do already when it is alone. A machine with more cores than the profile's is taken to hinder them as much as that one.
std::vector<double> Builder::speeds(int most, double (*part)(const StepTimes&)) const {
  const double alone = slowdown(std::min(threads_, profile_.cores), part);
  std::vector<double> all;
  for (int n = 1; n <= most; ++n) {
    const int measured = n > seats_ ? 2 * profile_.cores : profile_.cores;
    all.push_back(n * alone / slowdown(std::min(n * threads_, measured), part));
  }
  return all;
}

// Devices that have no core take turns. Twice as many as cores were measured, too.
std::vector<double> Builder::speeds_of_cores() const {
  const bool has_more = threads_ == 1 && seats_ == profile_.cores;
  std::vector<double> all =
      speeds(has_more ? 2 * seats_ : seats_, [](const StepTimes& times) { return times.forward + times.backward; });
  for (std::size_t n = to_size(seats_); n < all.size(); ++n) all[n] = std::min(all[n], all[to_size(seats_ - 1)]);
  return all;
}

std::vector<double> Builder::speeds_of_updates() const {
  return speeds(std::max(seats_, 2 * profile_.cores), [](const StepTimes& times) { return times.update; });
}

std::vector<double> Builder::speeds_of_copies() const {
  std::vector<double> speeds;
  for (const double speed : profile_.copy_speed) speeds.push_back(speed / profile_.copy_speed.front());
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
