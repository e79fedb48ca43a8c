// SPDX-License-Identifier: Apache-2.0
#include "tools/plan/schedules.h"

#include <cmath>
#include <numeric>

#include "lockstep/base/text.h"
#include "lockstep/collective/machines/machine_collective.h"
#include "lockstep/strategy/averaging/int8_blocks.h"
#include "lockstep/strategy/kvstore/key_plan.h"
#include "lockstep/strategy/strategies.h"
#include "tools/plan/builder.h"

namespace lockstep::plan {
namespace {

// The number of parts of at most `limit` bytes.
int number_of_parts(double bytes, double limit) { return std::max(1, static_cast<int>(std::ceil(bytes / limit))); }

void meet_on_machines(Builder& b) {
  for (int m = 0; m < b.machines(); ++m) b.meet(b.devices_on(m));
}

// [machine] what its devices have done so far
IntVector<Ids> last_of_machines(const Builder& b) {
  IntVector<Ids> last(b.machines());
  for (const int device : b.all_devices()) append(last[b.machine_of(device)], b.last(device));
  return last;
}

// The bytes of each part of each server's keys: parts are pushed one by one.
IntVector<IntVector<double>> parts_of_servers(const Profile& profile, int servers) {
  std::vector<Key> keys;
  for (const double bytes : profile.tensors) {
    const auto elements = static_cast<int64_t>(bytes / 4);
    keys.push_back({.elements = elements, .rows = std::max<int64_t>(1, elements)});
  }
  IntVector<IntVector<double>> parts;
  for (const BlockLayout& layout : plan_keys(keys, to_size(servers), KVStoreOptions().split_above)) {
    parts.emplace_back();
    for (const SliceRange range : layout.parts_of({0, layout.slices().size()})) {
      double bytes = 0;
      for (const KeySlice& slice : layout.slices_of(range)) bytes += to_double(slice.bytes());
      parts.back().push_back(bytes);
    }
  }
  return parts;
}

}  // namespace

void update_together(Builder& b, double share) {
  b.meet(b.all_devices());
  for (const int device : b.all_devices()) {
    if (share < 1 && b.target.memory_rate > 0)  // measured is an update with one gradient
      b.touch(device, "reduce", share * (b.devices() - 1) * b.profile.parameter_bytes);
    b.update(device, share);
  }
  b.meet(b.all_devices());
}

// All chunks of an exchange may be under way at the same time: the links carry them one after the other.
void all_reduce(Builder& b, const Ids& actors, double bytes, const IntVector<Ids>& after) {
  constexpr double kSignature = 24;  // bytes: neighbours compare what they call
  const int n = b.machines(), inside = b.target.devices;
  const int chunks = number_of_parts(bytes, to_double(chunk_bytes(static_cast<size_t>(bytes))));
  const double size = bytes / chunks;
  const bool one_round = is_worth_one_round(static_cast<size_t>(bytes), n);
  const double part = one_round ? size : size / n;  // that goes from one machine to another
  IntVector<Ids> ready = after, shared(n);
  for (int m = 0; m < n; ++m) append(ready[m], b.last(actors[m]));
  for (int c = 0; c < chunks; ++c) {
    Ids arrived, reduced;
    for (int m = 0; m < n; ++m) {
      if (inside > 1) ready[m] = {b.touch(nobody_on(m), "reduce", (inside + 1) * size, ready[m])};
      arrived.push_back(b.exchange(actors[m], part, ready[m], c == 0 ? kSignature : 0));
    }
    const int parts = b.join(arrived);
    for (int m = 0; m < n; ++m) {
      reduced.push_back(b.touch(nobody_on(m), "reduce", (n + 1) * part, {parts}));
      if (!one_round) reduced.back() = b.exchange(actors[m], part, {reduced.back()});
    }
    const int result = b.join(reduced);
    for (int m = 0; m < n; ++m)
      shared[m].push_back(inside > 1 ? b.touch(nobody_on(m), "share", 2 * size * inside, {result}) : result);
  }
  for (int m = 0; m < n; ++m) b.follow(actors[m], shared[m]);
}

void sum_up(Builder& b, double bytes) {
  meet_on_machines(b);
  if (b.machines() == 1) return;
  Ids first_devices;
  for (int m = 0; m < b.machines(); ++m) first_devices.push_back(b.devices_on(m).front());
  all_reduce(b, first_devices, bytes, IntVector<Ids>(b.machines()));
  meet_on_machines(b);
}

namespace {

// ---- On one machine

// docs/design/fused-step.md: publish, agree, each rank updates its slice from all gradients.
void ddp_in_memory(Builder& b) {
  b.forward_and_backward();
  update_together(b, 1.0 / b.devices());
}

// Threads: after each part the scheduling thread hears of all devices and gives them the next.
void devices_with_one_update(Builder& b) {
  b.forward();
  b.meet(b.all_devices());
  b.backward();
  update_together(b, 1.0 / b.devices());
}

// Each device reads its part of all gradients, writes their sum to all, and updates its own replica.
void towers(Builder& b) {
  if (b.choice.update_on_cpu) return devices_with_one_update(b);
  b.forward_and_backward();
  b.meet(b.all_devices());
  for (const int device : b.all_devices()) b.touch(device, "all_reduce", 2 * b.profile.parameter_bytes);
  update_together(b, 1);
}

// ---- Between machines. `networks`: for each machine an actor that exchanges beside its devices

// Buckets fill evenly while backward goes on; a thread of each machine exchanges them in their order. Gradients are copied into the
// buckets, and their means out of them; each device updates its slice.
void ddp_between_machines(Builder& b, const Ids& networks) {
  const int buckets = number_of_parts(b.profile.parameter_bytes, double{kCpuBucketBytes});
  const double bytes = b.profile.parameter_bytes / buckets;
  b.forward();
  for (int bucket = 0; bucket < buckets; ++bucket) {
    for (const int device : b.all_devices()) {
      b.compute(device, "backward", b.times_of(device).backward / buckets);
      b.touch(device, "pack", 2 * bytes);
    }
    all_reduce(b, networks, bytes, last_of_machines(b));
  }
  for (int m = 0; m < b.machines(); ++m) {
    b.meet(b.devices_on(m), b.last(networks[m]));
    for (const int device : b.devices_on(m)) {
      b.touch(device, "unpack", 2 * b.profile.parameter_bytes);
      b.update(device, 1.0 / b.target.devices);
    }
    b.meet(b.devices_on(m));
  }
}

// Each device reads and writes so many bytes, the first of each machine `more` besides.
void touch_all(Builder& b, const std::string& name, double bytes, double more) {
  for (const int device : b.all_devices()) b.touch(device, name, device % b.target.devices == 0 ? bytes + more : bytes);
  meet_on_machines(b);
}

// How many machines' bytes a sum is made of, where they come in int8.
int coded(const Builder& b) { return b.choice.averaging.in == AverageIn::kInt8 && b.machines() > 1 ? b.machines() : 0; }

// A part of the parameters goes on its way, in the background as a copy. Returns its arrivals on the machines.
Ids send_average(Builder& b, const Ids& networks, double bytes) {
  constexpr double kToInt8 = 22;  // int8_blocks.cc reads and writes, for each byte of float32
  const double read = averages_in_background(b.choice.averaging) ? 5 : 3;
  touch_all(b, "collect", (read + 1.0 / b.target.devices) * bytes, coded(b) > 0 ? kToInt8 * bytes : 0);
  const IntVector<Ids> ready = last_of_machines(b);
  if (coded(b) == 0 && b.machines() > 1) all_reduce(b, networks, bytes, ready);
  Ids arrivals;
  for (int m = 0; m < networks.size(); ++m)
    append(arrivals,
           coded(b) > 0 ? Ids{b.exchange(networks[m], bytes / 4 + bytes / kInt8Block, ready[m])} : b.last(networks[m]));
  return arrivals;
}

// It is waited for, and comes into all replicas, in the background by an outer step.
void take_average(Builder& b, double bytes, const Ids& arrivals) {
  constexpr double kOfSum = 8;  // as kToInt8: the outer step, and each machine's int8
  const bool in_background = averages_in_background(b.choice.averaging);
  for (int m = 0; m < b.machines(); ++m) b.meet(b.devices_on(m), arrivals);
  touch_all(b, "copy", (in_background ? 5 : 2) * bytes, (kOfSum * in_background * (1 + coded(b)) - 2) * bytes);
}

// Every device trains a replica; every h steps the replicas become one, part by part. arrivals: of the parts.
void averaging(Builder& b, const Ids& networks, int step, IntVector<Ids>& arrivals) {
  constexpr double kLoss = 24;  // bytes that are summed up
  const int64_t every = b.choice.averaging.every, parts = b.choice.averaging.parts, delay = b.choice.averaging.delay;
  b.forward_and_backward();
  sum_up(b, kLoss);
  for (const int device : b.all_devices()) b.update(device, 1);
  meet_on_machines(b);
  const double bytes = b.profile.parameter_bytes / to_double(parts);
  for (int part = 0; part < parts; ++part) {
    const auto is_due = [&](int64_t at) { return at >= 0 && at % every + 1 == every * (part + 1) / parts; };
    if (delay > 0 && is_due(step - delay)) take_average(b, bytes, arrivals[part]);
    if (!is_due(step)) continue;
    arrivals[part] = send_average(b, networks, bytes);
    if (delay == 0) take_average(b, bytes, arrivals[part]);
  }
}

// docs/strategies/kvstore.md: parts of a gradient go to the servers, in their order, while later ones are packed; new values come
// back while later parts go. A server merges, updates and copies under one lock, for all workers; a worker gets the values of a part
// when the server has its next part, too.
void store_sync(Builder& b, const Ids& servers) {
  constexpr double kLoss = 24;
  b.forward_and_backward();
  sum_up(b, kLoss);
  const auto parts_of = parts_of_servers(b.profile, servers.size());
  IntVector<Ids> answers(b.devices());
  for (int s = 0; s < servers.size(); ++s) {
    const int home = s % b.machines();
    const IntVector<double>& parts = parts_of[s];
    if (parts.empty()) continue;
    IntVector<Ids> pushed(parts.size() + 1);            // [part][device] their arrivals
    IntVector<Ids> sent(b.devices()), received = sent;  // [device] the newest message on its connection
    for (int part = 0; part < parts.size(); ++part)
      for (const int device : b.all_devices()) {
        Ids after{b.touch(device, "pack", 2 * parts[part])};
        append(after, sent[device]);
        const Builder::Message push = b.post(device, b.machine_of(device), home, "push", parts[part], after);
        sent[device] = {push.left};
        pushed[part].push_back(push.arrived);
      }
    pushed.back() = pushed[parts.size() - 1];
    for (int part = 0; part < parts.size(); ++part) {
      b.update(servers[s], parts[part] / b.profile.parameter_bytes, pushed[part]);
      for (const int device : b.all_devices()) {
        Ids after{b.touch(servers[s], "copy", 2 * parts[part]), pushed[part + 1][device]};
        append(after, received[device]);
        const Builder::Message pull = b.post(servers[s], home, b.machine_of(device), "pull", parts[part], after);
        received[device] = {pull.left};
        answers[device].push_back(pull.arrived);
      }
    }
  }
  for (const int device : b.all_devices()) b.touch(device, "unpack", 2 * b.profile.parameter_bytes, answers[device]);
}

// A worker pushes to all servers, and pulls from all when they have updated. It waits for no other worker.
void store_async(Builder& b) {
  b.forward_and_backward();
  const auto parts = parts_of_servers(b.profile, b.choice.servers);
  for (const int device : b.all_devices()) {
    const int machine = b.machine_of(device);
    Ids updated, pulled;
    const auto for_each_server = [&](const auto& talk) {
      for (int s = 0; s < parts.size(); ++s)
        talk(s % b.machines(), std::accumulate(parts[s].begin(), parts[s].end(), 0.0));
    };
    for_each_server([&](int home, double bytes) {
      const int packed = b.touch(device, "pack", 2 * bytes);
      const int pushed = b.post(device, machine, home, "push", bytes, {packed}).arrived;
      updated.push_back(b.update(nobody_on(home), bytes / b.profile.parameter_bytes, {pushed}));
    });
    for_each_server([&](int home, double bytes) {
      Ids ready{b.touch(nobody_on(home), "copy", 2 * bytes, updated)};
      append(ready, pulled);
      pulled = {b.post(device, home, machine, "pull", bytes, ready).arrived};
    });
    b.touch(device, "unpack", 2 * b.profile.parameter_bytes, pulled);
  }
}

void kvstore(Builder& b, const Ids& servers) {
  if (!b.choice.has_servers()) return devices_with_one_update(b);
  b.choice.store == KVStoreKind::kDistSync ? store_sync(b, servers) : store_async(b);
}

}  // namespace

Schedule schedule(const Profile& profile, const Target& wanted, const Choice& choice, int steps) {
  const Target target = choice.on(wanted);
  require_possible(target);
  Builder b(profile, target, choice);
  Ids networks, servers;
  IntVector<Ids> arrivals(to_int(choice.averaging.parts));
  if (target.machines > 1)
    for (int m = 0; m < target.machines; ++m) networks.push_back(b.add_actor(concat("network of machine ", m), m));
  if (choice.store == KVStoreKind::kDistSync)
    for (int s = 0; s < choice.servers; ++s) servers.push_back(b.add_actor(concat("server ", s), s % target.machines));
  for (int step = 0; step < steps; ++step) {
    switch (choice.kind) {
      using enum StrategyKind;
      case kSingle:
      case kDdp: target.machines == 1 ? ddp_in_memory(b) : ddp_between_machines(b, networks); break;
      case kTowers: towers(b); break;
      case kDataParallel: devices_with_one_update(b); break;
      case kKVStore: kvstore(b, servers); break;
      case kAveraging: averaging(b, networks, step, arrivals); break;
      case kPipeline: pipeline(b); break;
    }
    b.end_step();
  }
  return b.take();
}

}  // namespace lockstep::plan
