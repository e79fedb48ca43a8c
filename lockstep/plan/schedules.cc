// SPDX-License-Identifier: Apache-2.0
#include "lockstep/plan/schedules.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "lockstep/base/text.h"
#include "lockstep/error.h"

namespace lockstep::plan {
namespace {

using Ids = std::vector<int>;

constexpr double kOneRound = 16.0 * 1024;  // collective/machines/all_reduce.cc: up to here one round between machines
constexpr double kLeastChunk = 512.0 * 1024;    // an all_reduce between machines goes in eighths, but not below this,
constexpr double kMostChunk = 4.0 * (1 << 20);  // nor above this
constexpr int kParts = 16;                      // in which a gradient goes to a server in step

std::size_t at(int index) { return static_cast<std::size_t>(index); }

// ---- what all strategies are made of

class Builder {
 public:
  Builder(const Profile& profile, const Target& target, const Choice& choice, Luck luck)
      : profile_(profile), target_(target), choice_(choice), luck_(luck) {
    const int own_cores = target.cores > 0 ? target.cores : profile.cores;
    threads_ = std::max(1, own_cores / target.devices);
    seats_ = std::max(1, own_cores / threads_);
    for (int machine = 0; machine < target.machines; ++machine) add_machine(machine);
    for (int device = 0; device < devices(); ++device) add_actor(concat("device ", device));
    made_.devices = devices();
  }

  const Profile& profile() const { return profile_; }
  const Target& target() const { return target_; }
  const Choice& choice() const { return choice_; }
  int devices() const { return target_.all_devices(); }
  int machines() const { return target_.machines; }
  int machine_of(int device) const { return device / target_.devices; }
  double parameter_bytes() const { return static_cast<double>(profile_.parameter_bytes); }

  // As lockstep's sampler cuts a batch: the first parts are larger by one.
  double samples_of(int device) const {
    const auto all = target_.batch, parts = static_cast<std::int64_t>(devices());
    return static_cast<double>(all / parts + (device < all % parts ? 1 : 0));
  }

  // Of a device alone on its machine.
  StepTimes alone(double samples) const {
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

  int add_actor(const std::string& name) {
    made_.actors.push_back(name);
    last_.push_back({});
    return static_cast<int>(last_.size()) - 1;
  }

  // ---- An activity of `actor`, after what it did before and after `after`

  int compute(int actor, int machine, const std::string& name, double seconds, const Ids& after = {}) {
    return add(actor,
               {.name = name, .work = seconds * luck(actor), .uses = {made_.cores[at(machine)]}, .after = after});
  }

  // Bytes read and written.
  int touch(int actor, int machine, const std::string& name, double bytes, const Ids& after = {}) {
    return add(actor, {.name = name, .work = bytes, .uses = {made_.memory[at(machine)]}, .after = after});
  }

  int wait(int actor, const std::string& name, double seconds, const Ids& after = {}) {
    return add(actor, {.name = name, .delay = seconds, .after = after});
  }

  // A message. Inside a machine it is copied into shared memory and out of it.
  int send(int actor, int from, int to, const std::string& name, double bytes, const Ids& after = {}) {
    if (from == to) return touch(actor, from, name, 4 * bytes, after);
    sent_[at(from)] += bytes;
    received_[at(to)] += bytes;
    return add(actor, {.name = name,
                       .delay = target_.link_latency + message_,
                       .work = bytes,
                       .uses = {out_[at(from)], in_[at(to)], wire_[at(from)], wire_[at(to)]},
                       .after = after});
  }

  // As much from this machine to all others as from them to it.
  int exchange(int actor, int machine, const std::string& name, double bytes, const Ids& after = {}) {
    sent_[at(machine)] += bytes;
    received_[at(machine)] += bytes;
    return add(actor, {.name = name,
                       .delay = target_.link_latency + message_,
                       .work = bytes,
                       .uses = {out_[at(machine)], in_[at(machine)], wire_[at(machine)]},
                       .after = after});
  }

  // All of them go on when the last one is there.
  int meet(const Ids& actors, double seconds, const Ids& after = {}) {
    Ids all = after;
    for (const int actor : actors) all.insert(all.end(), last_[at(actor)].begin(), last_[at(actor)].end());
    const int met = made_.simulation.add(Activity{.name = "wait", .delay = seconds, .after = all});
    for (const int actor : actors) last_[at(actor)] = {met};
    return met;
  }

  Ids last(int actor) const { return last_[at(actor)]; }
  void follow(int actor, const Ids& activities) { last_[at(actor)] = activities; }

  Ids all_devices() const {
    Ids ids(at(devices()));
    std::iota(ids.begin(), ids.end(), 0);
    return ids;
  }
  Ids devices_on(int machine) const {
    Ids ids(at(target_.devices));
    std::iota(ids.begin(), ids.end(), machine * target_.devices);
    return ids;
  }

  // ---- What several strategies do

  // A barrier of the devices of a machine; ranks without a core of their own wait for the kernel to switch to them.
  double barrier() const { return target_.devices > seats_ ? profile_.crowded_barrier : profile_.barrier; }
  double handover() const { return target_.devices > seats_ ? profile_.crowded_handover : profile_.handover; }

  // Bytes that reducing `sources` gradients and updating touch: all gradients once, parameters and state in and out. In the
  // unit that makes the measured update of one source take as long as it did.
  double update_bytes(int sources) const {
    const double state = static_cast<double>(profile_.state_bytes);
    const double one = 3 * parameter_bytes() + 2 * state;
    const double measured = update_seconds(curve_for(profile_, 1, 1)) * profile_.copy_speed.front();
    return measured * (one + (sources - 1) * parameter_bytes()) / one;
  }

  void forward_and_backward(int device) {
    const StepTimes times = alone(samples_of(device));
    compute(device, machine_of(device), "forward", times.forward);
    compute(device, machine_of(device), "backward", times.backward);
  }

  void end_step() {
    made_.ends.emplace_back();
    for (int device = 0; device < devices(); ++device)
      for (const int activity : last_[at(device)]) made_.ends.back().push_back(activity);
  }

  Schedule take() {
    const double steps = static_cast<double>(std::max<std::size_t>(1, made_.ends.size()));
    for (int machine = 0; machine < machines(); ++machine)
      made_.sent_bytes = std::max({made_.sent_bytes, sent_[at(machine)] / steps, received_[at(machine)] / steps});
    return std::move(made_);
  }

 private:
  int add(int actor, Activity activity) {
    activity.actor = actor;
    activity.after.insert(activity.after.end(), last_[at(actor)].begin(), last_[at(actor)].end());
    const int id = made_.simulation.add(std::move(activity));
    last_[at(actor)] = {id};
    return id;
  }

  void add_machine(int machine) {
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
  std::vector<double> core_speeds() const {
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
  double luck(int device) const {
    const auto& spread = profile_.spread;
    if (spread.empty()) return 1;
    const std::size_t half = (spread.size() + 1) / 2;
    const std::size_t first = luck_ == Luck::kBad ? spread.size() - half : 0;
    const std::size_t count = luck_ == Luck::kAny ? spread.size() : half;
    const double place = 0.618034 * static_cast<double>(made_.ends.size()) + 0.414214 * device;
    return spread[first + static_cast<std::size_t>((place - std::floor(place)) * static_cast<double>(count))];
  }

  const Profile& profile_;
  const Target& target_;
  const Choice& choice_;
  Luck luck_;
  Schedule made_;
  std::vector<Ids> last_;  // of each actor: what its next activity waits for
  Ids out_, in_, wire_;    // of each machine
  std::vector<double> sent_, received_;
  double message_ = 0;  // seconds of a message, beside the link's
  int threads_ = 1;     // of a device
  int seats_ = 1;       // devices of a machine that can compute at the same time
};

// ---- One machine

void single(Builder& b) {
  b.forward_and_backward(0);
  b.compute(0, 0, "update", update_seconds(curve_for(b.profile(), 1, 1)));
}

// docs/design/fused-step.md: publish, agree, each rank updates its slice from all gradients.
void ddp_in_memory(Builder& b) {
  for (const int device : b.all_devices()) b.forward_and_backward(device);
  b.meet(b.all_devices(), 2 * b.barrier());
  for (const int device : b.all_devices()) b.touch(device, 0, "update", b.update_bytes(b.devices()) / b.devices());
  b.meet(b.all_devices(), b.barrier());
}

// Threads: after each part the scheduling thread hears of all devices and gives them the next.
void compute_on_threads(Builder& b) {
  for (const int device : b.all_devices()) b.compute(device, 0, "forward", b.alone(b.samples_of(device)).forward);
  b.meet(b.all_devices(), b.handover());
  for (const int device : b.all_devices()) b.compute(device, 0, "backward", b.alone(b.samples_of(device)).backward);
  b.meet(b.all_devices(), b.handover());
}

// One pass over memory on the cores of all devices.
void update_together(Builder& b, int sources) {
  for (const int device : b.all_devices()) b.touch(device, 0, "update", b.update_bytes(sources) / b.devices());
  b.meet(b.all_devices(), b.handover());
}

void towers(Builder& b) {
  compute_on_threads(b);
  if (b.choice().update_on_cpu) return update_together(b, b.devices());
  // Each device reads its part of all gradients and writes it to all: two waits for each parameter.
  const double waits = 2 * b.barrier() * static_cast<double>(b.profile().tensors.size());
  for (const int device : b.all_devices()) b.touch(device, 0, "all_reduce", 2 * b.parameter_bytes());
  b.meet(b.all_devices(), waits + b.handover());
  for (const int device : b.all_devices()) b.touch(device, 0, "update", b.update_bytes(1));
  b.meet(b.all_devices(), b.handover());
}

// The loss is computed on device 0, over the outputs of all.
void data_parallel(Builder& b) {
  const double loss = b.profile().loss;
  const auto without_loss = [&](double seconds, double samples) { return std::max(0.0, seconds - loss / 2 * samples); };
  for (const int device : b.all_devices()) {
    const double samples = b.samples_of(device);
    b.compute(device, 0, "forward", without_loss(b.alone(samples).forward, samples));
  }
  b.meet(b.all_devices(), b.handover());
  b.touch(0, 0, "gather", 2 * b.profile().output_bytes * static_cast<double>(b.target().batch));
  b.compute(0, 0, "loss", loss * static_cast<double>(b.target().batch));
  b.meet(b.all_devices(), b.handover());
  for (const int device : b.all_devices()) {
    const double samples = b.samples_of(device);
    b.compute(device, 0, "backward", without_loss(b.alone(samples).backward, samples));
  }
  b.meet(b.all_devices(), b.handover());
  update_together(b, b.devices());
}

void store_local(Builder& b) {
  compute_on_threads(b);
  update_together(b, b.devices());
}

// ---- Between machines

// docs/design/hierarchy.md: chunk by chunk, reduced inside each machine, exchanged, shared. `actors`: one per machine.
void all_reduce(Builder& b, const Ids& actors, double bytes, const std::vector<Ids>& after) {
  const int n = b.machines(), inside = b.target().devices;
  const double chunk = std::clamp(bytes / 8, kLeastChunk, kMostChunk);
  const int chunks = std::max(1, static_cast<int>(std::ceil(bytes / chunk - 1e-9)));
  const double size = bytes / chunks;
  const bool one_round = n == 2 || bytes <= kOneRound;
  const double each_round = one_round ? size * (n == 2 ? 1 : n - 1) : size * (n - 1) / n;
  std::vector<Ids> shared(at(n));
  Ids reduced(at(n), -1);
  for (int c = 0; c < chunks; ++c) {
    Ids ready;
    for (int m = 0; m < n; ++m) {
      Ids before = c == 0 ? after[at(m)] : Ids{reduced[at(m)]};
      const Ids network = b.last(actors[at(m)]);
      b.follow(actors[at(m)], {});
      reduced[at(m)] = b.touch(actors[at(m)], m, "reduce", inside > 1 ? (inside + 1) * size : 0, before);
      b.follow(actors[at(m)], network);
      ready.push_back(reduced[at(m)]);
    }
    for (int round = 0; round < (one_round ? 1 : 2); ++round) {
      b.meet(actors, 0, ready);
      for (int m = 0; m < n; ++m) b.exchange(actors[at(m)], m, "exchange", each_round);
    }
    for (int m = 0; m < n; ++m) {
      const Ids network = b.last(actors[at(m)]);
      const int done = b.touch(actors[at(m)], m, "share", inside > 1 ? 2 * size * inside : 0);
      b.follow(actors[at(m)], network);
      shared[at(m)].push_back(done);
    }
  }
  for (int m = 0; m < n; ++m) b.follow(actors[at(m)], shared[at(m)]);
}

// Buckets fill while backward goes on, the last parameters first; a thread of each machine exchanges them in that order.
void ddp_between_machines(Builder& b, const Ids& networks) {
  const Profile& profile = b.profile();
  for (const int device : b.all_devices())
    b.compute(device, b.machine_of(device), "forward", b.alone(b.samples_of(device)).forward);
  double all = 0, bucket = 0;
  for (const ModuleTimes& module : profile.modules) all += module.backward;
  std::vector<double> buckets;
  std::vector<std::vector<Ids>> full;  // [bucket][machine] after what
  for (std::size_t i = profile.modules.size(); i-- > 0;) {
    const ModuleTimes& module = profile.modules[i];
    for (const int device : b.all_devices())
      b.compute(device, b.machine_of(device), "backward " + module.name,
                b.alone(b.samples_of(device)).backward * module.backward / all);
    bucket += static_cast<double>(module.bytes);
    if (bucket < b.choice().bucket_bytes && i > 0) continue;
    for (; bucket > 0; bucket -= buckets.back()) {
      buckets.push_back(std::min(bucket, std::max(b.choice().bucket_bytes, 1.0)));
      full.emplace_back();
      for (int m = 0; m < b.machines(); ++m) {
        full.back().emplace_back();
        for (const int device : b.devices_on(m))
          for (const int activity : b.last(device)) full.back().back().push_back(activity);
      }
    }
  }
  for (std::size_t i = 0; i < buckets.size(); ++i) all_reduce(b, networks, buckets[i], full[i]);
  for (int m = 0; m < b.machines(); ++m) {
    b.meet(b.devices_on(m), b.barrier(), b.last(networks[at(m)]));
    for (const int device : b.devices_on(m)) b.touch(device, m, "update", b.update_bytes(1) / b.target().devices);
    b.meet(b.devices_on(m), b.barrier());
  }
}

// Every device trains a replica; every h steps the replicas become one.
void averaging(Builder& b, const Ids& networks, int step) {
  for (const int device : b.all_devices()) b.forward_and_backward(device);
  if (b.machines() > 1) b.meet(b.all_devices(), 2 * (b.target().link_latency) + b.handover());  // the loss of the batch
  for (const int device : b.all_devices()) b.touch(device, b.machine_of(device), "update", b.update_bytes(1));
  for (int m = 0; m < b.machines(); ++m) b.meet(b.devices_on(m), 2 * b.handover());
  if ((step + 1) % b.choice().average_every != 0) return;
  const double bytes = b.parameter_bytes();
  for (const int device : b.all_devices())
    b.touch(device, b.machine_of(device), "collect", 3 * bytes + bytes / b.target().devices);
  for (int m = 0; m < b.machines(); ++m) b.meet(b.devices_on(m), b.handover());
  if (b.machines() > 1) {
    std::vector<Ids> ready;
    for (int m = 0; m < b.machines(); ++m) ready.push_back(b.last(m * b.target().devices));
    all_reduce(b, networks, bytes, ready);
    for (int m = 0; m < b.machines(); ++m) b.meet(b.devices_on(m), 0, b.last(networks[at(m)]));
  }
  for (const int device : b.all_devices())
    if (device % b.target().devices != 0) b.touch(device, b.machine_of(device), "copy", 2 * bytes);
  for (int m = 0; m < b.machines(); ++m) b.meet(b.devices_on(m), b.handover());
}

// docs/strategies/kvstore.md: parts of a gradient go to the servers; a part comes back when all workers have pushed it. The
// requests of all workers share the server.
void store_sync(Builder& b, const Ids& servers) {
  for (const int device : b.all_devices()) b.forward_and_backward(device);
  b.meet(b.all_devices(), b.barrier());  // samples and loss
  const int count = static_cast<int>(servers.size());
  const int parts = std::max(1, kParts / count);
  const double size = b.parameter_bytes() / count / parts;
  std::vector<Ids> answers(at(b.devices()));
  std::vector<Ids> sent(at(b.devices()));
  for (const int device : b.all_devices()) sent[at(device)] = b.last(device);
  for (int part = 0; part < parts; ++part)
    for (int s = 0; s < count; ++s) {
      const int home = s % b.machines();
      Ids pushed;
      for (const int device : b.all_devices()) {
        const int machine = b.machine_of(device);
        b.follow(device, sent[at(device)]);
        const int packed = b.touch(device, machine, "pack", 2 * size);
        pushed.push_back(b.send(device, machine, home, "push", size));
        sent[at(device)] = {machine == home ? pushed.back()
                                            : packed};  // a message goes on while the next part is packed
      }
      const int merged = b.touch(servers[at(s)], home, "update", b.update_bytes(b.devices()) / (count * parts), pushed);
      for (const int device : b.all_devices()) {
        b.follow(device, {merged});
        answers[at(device)].push_back(b.send(device, home, b.machine_of(device), "pull", size));
      }
    }
  for (const int device : b.all_devices()) {
    b.follow(device, answers[at(device)]);
    b.touch(device, b.machine_of(device), "unpack", 2 * b.parameter_bytes());
  }
}

// A worker waits for its own push and pull, and for no other worker; the servers' memory is shared by whoever comes.
void store_async(Builder& b, int servers) {
  const double size = b.parameter_bytes() / servers;
  for (const int device : b.all_devices()) {
    const int machine = b.machine_of(device);
    b.forward_and_backward(device);
    Ids answers;
    const Ids start = b.last(device);
    for (int s = 0; s < servers; ++s) {
      const int home = s % b.machines();
      b.follow(device, start);
      b.touch(device, machine, "pack", 2 * size);
      b.send(device, machine, home, "push", size);
      b.touch(device, home, "server updates", b.update_bytes(1) / servers);
      answers.push_back(b.send(device, home, machine, "pull", size));
    }
    b.follow(device, answers);
    b.touch(device, machine, "unpack", 2 * b.parameter_bytes());
  }
}

// ---- Pipeline

struct Turn {
  bool forward;
  int micro_batch;
};

// The order in which a stage works, as strategy/pipeline/stage.h has it.
std::vector<Turn> turns_of(Order order, int stage, int stages, int micro_batches) {
  const int ahead = order == Order::k1F1B ? std::min(stages - stage, micro_batches) : micro_batches;
  std::vector<Turn> turns;
  for (int i = 0; i < ahead; ++i) turns.push_back({true, i});
  for (int i = 0; i < micro_batches; ++i) {
    turns.push_back({false, i});
    if (ahead + i < micro_batches) turns.push_back({true, ahead + i});
  }
  return turns;
}

void pipeline(Builder& b) {
  const Profile& profile = b.profile();
  const int stages = b.choice().stages,
            micro_batches = b.choice().order == Order::kNaive ? 1 : b.choice().micro_batches;
  const auto cut = stages_of(profile, stages);
  const double samples = static_cast<double>(b.target().batch) / micro_batches;
  const StepTimes times = b.alone(samples);
  double all = 0;
  for (const PieceTimes& piece : profile.pieces) all += piece.seconds;
  std::vector<double> share(at(stages)), bytes(at(stages)), output(at(stages));
  for (int stage = 0; stage < stages; ++stage)
    for (const int piece : cut[at(stage)]) {
      share[at(stage)] += profile.pieces[at(piece)].seconds / all;
      bytes[at(stage)] += static_cast<double>(profile.pieces[at(piece)].bytes);
      output[at(stage)] = profile.pieces[at(piece)].output_bytes * samples;
    }
  const bool processes = b.machines() > 1;
  // [stage][micro-batch]: what the next stage, or the one before, waits for. Turns are taken in rounds, so that what a turn
  // waits for has been added.
  std::vector<Ids> forward(at(stages), Ids(at(micro_batches), -1)), backward = forward;
  std::vector<std::vector<Turn>> turns;
  for (int stage = 0; stage < stages; ++stage)
    turns.push_back(turns_of(b.choice().order, stage, stages, micro_batches));
  std::vector<std::size_t> next(at(stages));
  const auto hand_on = [&](int from, int to, const std::string& name, double size, int after) {
    const int here = b.machine_of(from), there = b.machine_of(to);
    if (!processes) return after;  // threads pass on what they have
    const Ids last = b.last(from);
    b.follow(from, {});
    const int arrived = b.send(from, here, there, name, size, {after});
    b.follow(from, last);
    return arrived;
  };
  for (bool moved = true; moved;) {
    moved = false;
    for (int stage = 0; stage < stages; ++stage) {
      while (next[at(stage)] < turns[at(stage)].size()) {
        const auto [is_forward, k] = turns[at(stage)][next[at(stage)]];
        const int neighbour = is_forward ? stage - 1 : stage + 1;
        const bool alone = neighbour < 0 || neighbour == stages;
        const int waits_for = alone ? -1 : (is_forward ? forward : backward)[at(neighbour)][at(k)];
        if (!alone && waits_for < 0) break;
        const double seconds = share[at(stage)] * (is_forward ? times.forward : times.backward);
        const int done = b.compute(stage, b.machine_of(stage), concat(is_forward ? "forward " : "backward ", k),
                                   seconds, alone ? Ids{} : Ids{waits_for});
        const bool hands_on = is_forward ? stage + 1 < stages : stage > 0;
        const double size = is_forward ? output[at(stage)] : stage > 0 ? output[at(stage - 1)] : 0;
        const int arrived = hands_on ? hand_on(stage, is_forward ? stage + 1 : stage - 1,
                                               is_forward ? "activations" : "gradients", size, done)
                                     : done;
        (is_forward ? forward : backward)[at(stage)][at(k)] = arrived;
        ++next[at(stage)];
        moved = true;
      }
    }
  }
  if (!processes) {
    b.meet(b.all_devices(), b.handover());
    return update_together(b, 1);
  }
  const double whole = std::accumulate(bytes.begin(), bytes.end(), 0.0);
  for (int stage = 0; stage < stages; ++stage)
    b.touch(stage, b.machine_of(stage), "update", b.update_bytes(1) * bytes[at(stage)] / whole);
  b.meet(b.all_devices(), 2 * b.target().link_latency);
}

void require_fitting(const Profile& profile, const Target& target, const Choice& choice) {
  const auto require = [&](bool good, const std::string& what) {
    if (!good) throw UsageError({.what = concat(choice.name(), ": ", what)});
  };
  const bool one_process = choice.method == Method::kTowers || choice.method == Method::kDataParallel ||
                           choice.method == Method::kStoreLocal;
  require(choice.method != Method::kSingle || target.all_devices() == 1, "it trains on one device");
  require(!one_process || target.machines == 1, "its devices are threads of one process, on one machine");
  if (choice.method != Method::kPipeline) return;
  require(choice.stages == target.all_devices(), "a forecast has a stage for each device");
  require(choice.stages <= std::ssize(profile.pieces),
          concat("the model has ", profile.pieces.size(), " pieces, too few for ", choice.stages, " stages"));
  require(choice.order == Order::kNaive || choice.micro_batches <= target.batch, "more micro-batches than samples");
}

}  // namespace

std::vector<std::vector<int>> stages_of(const Profile& profile, int stages) {
  const auto pieces = static_cast<int>(profile.pieces.size());
  // best[s][end]: the slowest of s stages that share the pieces before `end`, at best.
  std::vector best(at(stages + 1), std::vector<double>(at(pieces + 1), 1e300));
  std::vector begins(at(stages + 1), std::vector<int>(at(pieces + 1)));
  best[0][0] = 0;
  for (int s = 1; s <= stages; ++s)
    for (int end = s; end <= pieces; ++end) {
      double last = 0;
      for (int begin = end - 1; begin >= s - 1; --begin) {
        last += profile.pieces[at(begin)].seconds;
        const double slowest = std::max(best[at(s - 1)][at(begin)], last);
        if (slowest >= best[at(s)][at(end)]) continue;
        best[at(s)][at(end)] = slowest;
        begins[at(s)][at(end)] = begin;
      }
    }
  std::vector<std::vector<int>> cut(at(stages));
  for (int s = stages, end = pieces; s > 0; --s) {
    const int begin = begins[at(s)][at(end)];
    for (int piece = begin; piece < end; ++piece) cut[at(s - 1)].push_back(piece);
    end = begin;
  }
  return cut;
}

Schedule schedule(const Profile& profile, const Target& target, const Choice& choice, int steps, Luck luck) {
  require_possible(target);
  require_fitting(profile, target, choice);
  Builder b(profile, target, choice, luck);
  Ids networks, servers;
  if (target.machines > 1)
    for (int m = 0; m < target.machines; ++m) networks.push_back(b.add_actor(concat("network of machine ", m)));
  if (choice.method == Method::kStoreSync)
    for (int s = 0; s < choice.servers; ++s) servers.push_back(b.add_actor(concat("server ", s)));
  for (int step = 0; step < steps; ++step) {
    switch (choice.method) {
      case Method::kSingle: single(b); break;
      case Method::kDdp: target.machines > 1 ? ddp_between_machines(b, networks) : ddp_in_memory(b); break;
      case Method::kTowers: towers(b); break;
      case Method::kDataParallel: data_parallel(b); break;
      case Method::kStoreLocal: store_local(b); break;
      case Method::kStoreSync: store_sync(b, servers); break;
      case Method::kStoreAsync: store_async(b, choice.servers); break;
      case Method::kAveraging: averaging(b, networks, step); break;
      case Method::kPipeline: pipeline(b); break;
    }
    b.end_step();
  }
  return b.take();
}

}  // namespace lockstep::plan
