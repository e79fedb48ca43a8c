// SPDX-License-Identifier: Apache-2.0
#include "tools/plan/builder.h"

#include <cmath>

#include "lockstep/base/text.h"
#include "lockstep/sampler.h"

namespace lockstep::plan {
namespace {

// The bytes of a message are constants of the protocols that carry it:
//
//   Gloo       the receiver says that it is ready (48 bytes back); then come a header (48) and the data
//   TLS 1.3    each of the three in records of up to 16 KiB, and 22 bytes more in each: header 5, type 1, tag 16
//   TCP, IP    segments of up to 1448 bytes: Ethernet's 1500 less IPv4's header (20), TCP's (20) and its timestamps (12)
//   Ethernet   14 bytes before each
//
// Every second segment of the data is acknowledged by one without data, as RFC 5681 asks for. A receiver that puts segments
// together before it looks at them sends fewer: up to 2.2 % less goes back than this says.
constexpr double kGlooHeader = 48;
constexpr double kRecord = 16384, kOfRecord = 5 + 1 + 16;
constexpr double kSegment = 1500 - 20 - 20 - 12, kOfSegment = 14 + 20 + 20 + 12;

double encrypted(double bytes) { return bytes + std::ceil(bytes / kRecord) * kOfRecord; }

double segments(double bytes) { return std::ceil(encrypted(bytes) / kSegment); }

// The packets of one write to the connection.
double written(double bytes) { return encrypted(bytes) + segments(bytes) * kOfSegment; }

}  // namespace

MessageBytes bytes_on_wire(double bytes) {
  return {.there = written(kGlooHeader) + written(bytes),
          .back = written(kGlooHeader) + std::floor(segments(bytes) / 2) * kOfSegment};
}

Builder::Builder(const Profile& measured, const Target& wanted, const Choice& chosen)
    : profile(measured),
      target(wanted),
      choice(chosen),
      sent_(target.machines),
      received_(target.machines),
      latency_(target.link_latency + line_through(profile.loopback).fixed),
      work_(work_of_messages(profile)),
      copy_speed_(profile.copy_speed) {
  const int cores = target.cores > 0 ? target.cores : profile.cores;
  threads_ = std::max(1, cores / target.devices);
  seats_ = std::max(1, cores / threads_);
  if (target.memory_rate > 0) copy_speed_ = std::min(threads_ * copy_speed_, target.memory_rate);
  for (int machine = 0; machine < target.machines; ++machine) add_machine(machine);
  for (int device = 0; device < devices(); ++device) add_actor(concat("device ", device), device / target.devices);
}

// Measured are one thread, and one for each core; between the two it is taken evenly in logarithms. Beyond, each doubling gains as much,
// and no update is faster than the memory; where that is not known, more threads gain nothing.
StepTimes Builder::alone(double samples) const {
  const auto threads_alone = [](const Curve& curve) { return curve.at_once == 1 ? curve.threads : 0; };
  const Curve& all = *std::ranges::max_element(profile.curves, {}, threads_alone);
  const StepTimes one = times_for(profile.curves.front(), samples);
  if (threads_ == 1 || all.threads == 1) return one;
  const StepTimes most = times_for(all, samples);
  const double n = all.threads, share = std::log(threads_) / std::log(n);
  const double of_memory = target.memory_rate > 0 ? profile.copy_speed / target.memory_rate : 0;
  const auto between = [&](double from, double to, double least) {
    if (from <= 0) return to;
    if (threads_ <= n || target.memory_rate <= 0) return from * std::pow(to / from, std::min(1.0, share));
    return from * std::max(std::pow(std::max(to / from, 1 / n), share), least);
  };
  return {.samples = one.samples,
          .forward = between(one.forward, most.forward, 0),
          .backward = between(one.backward, most.backward, 0),
          .update = between(one.update, most.update, of_memory)};
}

StepTimes Builder::times_of(int device) const {
  return alone(to_double(even_part(target.batch, device, devices()).size()));
}

int Builder::add_actor(const std::string& name, int machine) {
  made_.actors.push_back(name);
  machine_of_.push_back(machine);
  last_.push_back({});
  return last_.size() - 1;
}

int Builder::compute(int device, const std::string& name, double seconds, const Ids& after) {
  return work(device, name, Kind::kComputing, seconds, after);
}

int Builder::touch(int actor, const std::string& name, double bytes, const Ids& after) {
  return work(actor, name, Kind::kMemory, bytes / copy_speed_, after);
}

int Builder::update(int actor, double share, const Ids& after) {
  return work(actor, "update", Kind::kMemory, share * alone(1).update, after);
}

// Messages of one connection follow each other; the time that each is under way does not keep the next one waiting.
Builder::Message Builder::post(int actor, int from, int to, const std::string& name, double bytes, const Ids& after) {
  if (from == to) {
    const int copied = touch(nobody_on(from), name, 4 * bytes, after);
    return {copied, copied};
  }
  const MessageBytes wire = bytes_on_wire(bytes);
  sent_[from] += wire.there;
  received_[to] += wire.there;
  sent_[to] += wire.back;
  received_[from] += wire.back;
  const int left = made_.simulation.add(Activity{.name = name,
                                                 .kind = Kind::kLink,
                                                 .actor = actor,
                                                 .work = wire.there,
                                                 .uses = {out_[from], in_[to]},
                                                 .after = after});
  const double one_end = work_.at(bytes) / 2;
  return {left,
          join({join({left}, latency_), handle_messages(from, one_end, after), handle_messages(to, one_end, after)})};
}

int Builder::exchange(int actor, double bytes, const Ids& after, double to_next) {
  const int machine = machine_of(actor);
  double all = 0, seconds = 0;
  const auto add = [&](double messages, double size) {
    const MessageBytes wire = bytes_on_wire(size);
    all += messages * (wire.there + wire.back);
    seconds += messages * work_.at(size);
  };
  add(machines() - 1, bytes);
  if (to_next > 0) add(1, to_next);
  sent_[machine] += all;
  received_[machine] += all;
  const int carried = made_.simulation.add(Activity{.name = "exchange",
                                                    .kind = Kind::kLink,
                                                    .actor = actor,
                                                    .delay = latency_,
                                                    .work = all,
                                                    .uses = {out_[machine], in_[machine]},
                                                    .after = after});
  return join({carried, handle_messages(machine, seconds, after)});
}

int Builder::join(const Ids& after, double seconds) {
  return made_.simulation.add(Activity{.delay = seconds, .after = after});
}

// Calls of the system, encryption and woken threads, on any core of the machine.
int Builder::handle_messages(int machine, double seconds, const Ids& after) {
  return work(nobody_on(machine), "messages", Kind::kComputing, seconds, after);
}

void Builder::meet(const Ids& actors, const Ids& after) {
  Ids all = after;
  for (const int actor : actors) append(all, last_[actor]);
  const int met = join(all);
  for (const int actor : actors) last_[actor] = {met};
}

void Builder::forward() {
  for (const int device : all_devices()) compute(device, "forward", times_of(device).forward);
}

void Builder::backward() {
  for (const int device : all_devices()) compute(device, "backward", times_of(device).backward);
}

void Builder::forward_and_backward() {
  forward();
  backward();
}

void Builder::end_step() {
  made_.ends.emplace_back();
  for (const int device : all_devices()) append(made_.ends.back(), last_[device]);
}

Schedule Builder::take() {
  const double steps = std::max(1, made_.ends.size());
  made_.sent_bytes = std::max(std::ranges::max(sent_), std::ranges::max(received_)) / steps;
  return std::move(made_);
}

// A device runs on its own cores, or takes turns with those that are bound to the same one; a server runs where there is room.
int Builder::work(int actor, const std::string& name, Kind kind, double seconds, const Ids& after) {
  Activity activity{.name = name,
                    .kind = kind,
                    .actor = actor,
                    .work = seconds,
                    .uses = {made_.cores[machine_of(actor)]},
                    .after = after};
  if (!memory_.empty() && kind == Kind::kMemory) activity.uses.push_back(memory_[machine_of(actor)]);
  if (actor < 0) return made_.simulation.add(std::move(activity));
  if (actor < devices()) activity.uses.push_back(made_.seats[actor]);
  Ids& last = last_[actor];
  append(activity.after, last);
  last = {made_.simulation.add(std::move(activity))};
  return last.front();
}

// Devices are bound to cores as the launcher binds ranks, and Devices their threads.
void Builder::add_machine(int machine) {
  Simulation& simulation = made_.simulation;
  made_.cores.push_back(simulation.add(Resource{concat("cores of machine ", machine), speeds_of_cores()}));
  out_.push_back(simulation.add(Resource{concat("link from machine ", machine), {target.link_rate}}));
  in_.push_back(simulation.add(Resource{concat("link to machine ", machine), {target.link_rate}}));
  if (target.memory_rate > 0) memory_.push_back(simulation.add(Resource{"memory", {target.memory_rate / copy_speed_}}));
  Ids seats;
  for (int i = 0; i < std::min(seats_, target.devices); ++i)
    seats.push_back(simulation.add(Resource{concat("seat ", i), {1}}));
  for (int i = 0; i < target.devices; ++i) made_.seats.push_back(seats[i % seats.size()]);
}

// The factor by which computing takes longer while that many work than alone. A machine with more cores than the profile's is taken to
// hinder them as much as that one.
double Builder::slowdown(int at_once) const {
  const double samples = std::max(1.0, to_double(target.batch) / devices());
  const auto in_one_process = [](const Curve& curve) { return curve.in_one_process; };
  const bool are_threads =
      choice.has_device_threads() && target.devices > 1 && std::ranges::any_of(profile.curves, in_one_process);
  for (const Curve& curve : profile.curves) {
    if (curve.at_once == 1 || curve.in_one_process != are_threads) continue;
    const double alone = times_for(profile.curves.front(), samples).computing();
    const double slower = std::max(1.0, times_for(curve, samples).computing() / alone);
    return 1 + (slower - 1) * (std::min(at_once, curve.at_once) - 1) / (curve.at_once - 1);
  }
  return 1;
}

// Seconds of work of one device alone, done in a second while n work. Those at the same time hinder each other, as the threads of
// one do already when it is alone; those without a core take turns.
std::vector<double> Builder::speeds_of_cores() const {
  std::vector<double> speeds;
  for (int n = 1; n <= seats_; ++n) speeds.push_back(n * slowdown(threads_) / slowdown(n * threads_));
  return speeds;
}

}  // namespace lockstep::plan
