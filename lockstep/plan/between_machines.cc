// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>

#include "lockstep/plan/strategy_schedules.h"
#include "lockstep/strategy/kvstore/key_plan.h"

namespace lockstep::plan {
namespace {

constexpr double kOneRound = 16.0 * 1024;  // collective/machines/all_reduce.cc: up to here one round between machines
constexpr double kLeastChunk = 512.0 * 1024;    // an all_reduce between machines goes in eighths, but not below this,
constexpr double kMostChunk = 4.0 * (1 << 20);  // nor above this
constexpr double kSignature = 24;               // bytes: machines compare what they call

void append(Ids& all, const Ids& more) { all.insert(all.end(), more.begin(), more.end()); }

// docs/design/hierarchy.md: chunk by chunk, reduced inside each machine, exchanged in two rounds, shared. A chunk's parts leave
// while the two chunks before it are under way. `actors`: one per machine.
void all_reduce(Builder& b, const Ids& actors, double bytes, const std::vector<Ids>& after) {
  const int n = b.machines(), inside = b.target().devices;
  const double chunk = std::clamp(bytes / 8, kLeastChunk, kMostChunk);
  const int chunks = std::max(1, static_cast<int>(std::ceil(bytes / chunk - 1e-9)));
  const double size = bytes / chunks;
  const bool one_round = n == 2 || bytes <= kOneRound;
  const double part = one_round ? size : size / n;  // that goes from one machine to another
  std::vector<Ids> before = after, shared(at(n));
  Ids parts, results;  // [chunk] once the parts, and the results, are on all machines
  for (int c = 0; c < chunks; ++c) {
    Ids arrived;
    for (int m = 0; m < n; ++m) {
      if (inside > 1) before[at(m)] = {b.pass(m, (inside + 1) * size, before[at(m)])};
      Ids ready = before[at(m)];
      if (c == 0) append(ready, b.last(actors[at(m)]));
      if (c >= 2) ready.push_back(parts[at(c - 2)]);
      if (c >= 3) ready.push_back(results[at(c - 3)]);
      arrived.push_back(b.exchange(actors[at(m)], m, "exchange", part, ready));
      if (c == 0) arrived.push_back(b.exchange(actors[at(m)], m, "compare", kSignature, ready));
    }
    parts.push_back(b.join(arrived));
    Ids reduced;
    for (int m = 0; m < n; ++m) reduced.push_back(b.pass(m, (n + 1) * part, {parts.back()}));
    if (!one_round)
      for (int m = 0; m < n; ++m) {
        Ids ready{reduced[at(m)]};
        if (c >= 2) ready.push_back(results[at(c - 2)]);
        reduced[at(m)] = b.exchange(actors[at(m)], m, "exchange", part, ready);
      }
    results.push_back(b.join(reduced));
    for (int m = 0; m < n; ++m)
      shared[at(m)].push_back(inside > 1 ? b.pass(m, 2 * size * inside, {results.back()}) : results.back());
  }
  for (int m = 0; m < n; ++m) b.follow(actors[at(m)], shared[at(m)]);
}

// Of a few numbers.
void all_reduce(Builder& b, const Ids& actors, double bytes) {
  all_reduce(b, actors, bytes, std::vector<Ids>(at(b.machines())));
}

Ids first_devices(const Builder& b) {
  Ids devices;
  for (int m = 0; m < b.machines(); ++m) devices.push_back(m * b.target().devices);
  return devices;
}

// The parts of each server's keys that are pushed one by one.
std::vector<std::vector<double>> parts_of_servers(const Profile& profile, int servers) {
  constexpr std::int64_t kSplitAbove = 1'000'000;  // elements: strategy.h
  std::vector<Key> keys;
  for (const double bytes : profile.tensors) {
    const auto elements = static_cast<std::int64_t>(bytes / 4);
    keys.push_back({.name = "", .elements = elements, .rows = std::max<std::int64_t>(1, elements)});
  }
  std::vector<std::vector<double>> parts;
  for (const BlockLayout& layout : plan_keys(keys, at(servers), kSplitAbove)) {
    parts.emplace_back();
    for (const SliceRange range : layout.parts_of({0, layout.slices().size()})) {
      double bytes = 0;
      for (const KeySlice& slice : layout.slices_of(range)) bytes += static_cast<double>(slice.bytes());
      parts.back().push_back(bytes);
    }
  }
  return parts;
}

}  // namespace

void sum_up(Builder& b, double bytes) {
  if (b.machines() == 1) {
    b.meet(b.all_devices(), b.barrier());
    return;
  }
  for (int m = 0; m < b.machines(); ++m) b.meet(b.devices_on(m), b.barrier());
  all_reduce(b, first_devices(b), bytes);
  for (int m = 0; m < b.machines(); ++m) b.meet(b.devices_on(m), b.barrier());
}

// Buckets fill while backward goes on, the last parameters first; a thread of each machine exchanges them in that order, after
// the number of samples. Gradients are copied into the buckets, and their means out of them.
void ddp_between_machines(Builder& b, const Ids& networks) {
  constexpr double kTotals = 80;  // gradient/exchange_totals.h
  const Profile& profile = b.profile();
  const auto ready_on = [&b](int machine) {
    Ids ready;
    for (const int device : b.devices_on(machine)) append(ready, b.last(device));
    return ready;
  };
  std::vector<Ids> ready;
  for (const int device : b.all_devices())
    b.compute(device, b.machine_of(device), "forward", b.alone(b.samples_of(device)).forward);
  for (int m = 0; m < b.machines(); ++m) ready.push_back(ready_on(m));
  all_reduce(b, networks, kTotals, ready);
  double all = 0, bucket = 0;
  for (const ModuleTimes& module : profile.modules) all += module.backward;
  std::vector<double> buckets;
  std::vector<std::vector<Ids>> full;  // [bucket][machine] after what
  for (std::size_t i = profile.modules.size(); i-- > 0;) {
    const ModuleTimes& module = profile.modules[i];
    const auto bytes = static_cast<double>(module.bytes);
    for (const int device : b.all_devices()) {
      b.compute(device, b.machine_of(device), "backward " + module.name,
                b.alone(b.samples_of(device)).backward * module.backward / all);
      if (bytes > 0) b.touch(device, b.machine_of(device), "pack", 2 * bytes);
    }
    bucket += bytes;
    if (bucket < b.choice().bucket_bytes && i > 0) continue;
    for (; bucket > 0; bucket -= buckets.back()) {
      buckets.push_back(std::min(bucket, std::max(b.choice().bucket_bytes, 1.0)));
      full.emplace_back();
      for (int m = 0; m < b.machines(); ++m) full.back().push_back(ready_on(m));
    }
  }
  for (std::size_t i = 0; i < buckets.size(); ++i) all_reduce(b, networks, buckets[i], full[i]);
  for (int m = 0; m < b.machines(); ++m) {
    b.meet(b.devices_on(m), b.barrier(), b.last(networks[at(m)]));
    for (const int device : b.devices_on(m)) {
      b.touch(device, m, "unpack", 2 * b.parameter_bytes());
      b.update(device, m, 1.0 / b.target().devices);
    }
    b.meet(b.devices_on(m), b.barrier());
  }
}

// Every device trains a replica; every h steps the replicas become one.
void averaging(Builder& b, const Ids& networks, int step) {
  constexpr double kLoss = 24, kSamples = 8;  // bytes that are summed up
  for (const int device : b.all_devices()) b.forward_and_backward(device);
  for (int m = 0; m < b.machines(); ++m) b.meet(b.devices_on(m), b.handover());
  if (b.machines() > 1) sum_up(b, kLoss);
  for (const int device : b.all_devices()) b.update(device, b.machine_of(device), 1);
  for (int m = 0; m < b.machines(); ++m) b.meet(b.devices_on(m), 2 * b.handover());
  if ((step + 1) % b.choice().average_every != 0) return;
  if (b.machines() > 1) sum_up(b, kSamples);
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

// docs/strategies/kvstore.md: parts of a gradient go to the servers, in their order, while later ones are packed; a part comes
// back when all workers have pushed it. A server merges, updates and copies under one lock, for all workers.
void store_sync(Builder& b, const Ids& servers) {
  constexpr double kLoss = 24;
  for (const int device : b.all_devices()) b.forward_and_backward(device);
  sum_up(b, kLoss);
  const auto parts = parts_of_servers(b.profile(), static_cast<int>(servers.size()));
  std::vector<Ids> answers(at(b.devices()));
  for (std::size_t s = 0; s < servers.size(); ++s) {
    const int home = static_cast<int>(s) % b.machines();
    std::vector<Ids> pushes(at(b.devices())), pulls(at(b.devices()));  // what the next one on a connection waits for
    for (const double size : parts[s]) {
      Ids pushed;
      for (const int device : b.all_devices()) {
        const int machine = b.machine_of(device);
        Ids ready{b.touch(device, machine, "pack", 2 * size)};
        append(ready, pushes[at(device)]);
        const Builder::Message push = b.post(device, machine, home, "push", size, ready);
        pushes[at(device)] = {push.left};
        pushed.push_back(push.arrived);
      }
      b.update(servers[s], home, size / b.parameter_bytes(), b.devices(), pushed);
      for (const int device : b.all_devices()) {
        Ids ready{b.touch(servers[s], home, "copy", 2 * size)};
        append(ready, pulls[at(device)]);
        const Builder::Message pull = b.post(servers[s], home, b.machine_of(device), "pull", size, ready);
        pulls[at(device)] = {pull.left};
        answers[at(device)].push_back(pull.arrived);
      }
    }
  }
  for (const int device : b.all_devices())
    b.touch(device, b.machine_of(device), "unpack", 2 * b.parameter_bytes(), answers[at(device)]);
}

// A worker pushes to all servers, hears of each that it has updated, then pulls from all. It waits for no other worker, but a
// server works for one at a time.
void store_async(Builder& b, const Ids& locks) {
  constexpr double kRequest = 100, kReply = 8;  // bytes, about
  const int servers = static_cast<int>(locks.size());
  const auto parts = parts_of_servers(b.profile(), servers);
  for (const int device : b.all_devices()) {
    const int machine = b.machine_of(device);
    b.forward_and_backward(device);
    Ids updated, pulled;
    for (int s = 0; s < servers; ++s) {
      const int home = s % b.machines();
      double size = 0;
      for (const double part : parts[at(s)]) size += part;
      const int packed = b.touch(device, machine, "pack", 2 * size);
      const int pushed = b.post(device, machine, home, "push", size, {packed}).arrived;
      const int done = b.update_locked(locks[at(s)], home, size / b.parameter_bytes(), {pushed});
      updated.push_back(b.post(device, home, machine, "updated", kReply, {done}).arrived);
    }
    for (int s = 0; s < servers; ++s) {
      const int home = s % b.machines();
      double size = 0;
      for (const double part : parts[at(s)]) size += part;
      const int asked = b.post(device, machine, home, "ask", kRequest, updated).arrived;
      const int copied = b.pass_locked(locks[at(s)], home, 2 * size, {asked});
      pulled.push_back(b.post(device, home, machine, "pull", size, {copied}).arrived);
    }
    b.touch(device, machine, "unpack", 2 * b.parameter_bytes(), pulled);
  }
}

}  // namespace lockstep::plan
