// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <numeric>

#include "lockstep/collective/machines/machine_collective.h"
#include "lockstep/plan/strategy_schedules.h"
#include "lockstep/strategy/kvstore/key_plan.h"
#include "lockstep/strategy/option_names.h"

namespace lockstep::plan {
namespace {

constexpr double kOneRound = 16.0 * 1024;  // collective/machines/all_reduce.cc: up to here one round between machines
// An all_reduce between machines goes in eighths, but not below or above these.
constexpr auto kLeastChunk = static_cast<double>(chunk_bytes(0)),
               kMostChunk = static_cast<double>(chunk_bytes(1 << 30));
constexpr double kSignature = 24;  // bytes: machines compare what they call

void append(Ids& all, const Ids& more) { all.insert(all.end(), more.begin(), more.end()); }

void meet_on_machines(Builder& b, double seconds) {
  for (int m = 0; m < b.machines(); ++m) b.meet(b.devices_on(m), seconds);
}

Ids first_devices(const Builder& b) {
  Ids devices;
  for (int m = 0; m < b.machines(); ++m) devices.push_back(m * b.target().devices);
  return devices;
}

// The parts of each server's keys that are pushed one by one.
std::vector<std::vector<double>> parts_of_servers(const Profile& profile, int servers) {
  std::vector<Key> keys;
  for (const double bytes : profile.tensors) {
    const auto elements = static_cast<std::int64_t>(bytes / 4);
    keys.push_back({.elements = elements, .rows = std::max<std::int64_t>(1, elements)});
  }
  std::vector<std::vector<double>> parts;
  for (const BlockLayout& layout : plan_keys(keys, to_size(servers), KVStoreOptions().split_above)) {
    parts.emplace_back();
    for (const SliceRange range : layout.parts_of({0, layout.slices().size()})) {
      double bytes = 0;
      for (const KeySlice& slice : layout.slices_of(range)) bytes += static_cast<double>(slice.bytes());
      parts.back().push_back(bytes);
    }
  }
  return parts;
}

// ---- Two bits, the only compression of gradients to servers

bool is_compressed(const Builder& b) { return b.choice().compression != Compression::kNone; }

const CompressionTimes& two_bits(const Builder& b) {
  return compression_for(b.profile(), name_of(b.choice().compression));
}

double sent_share(const Builder& b) { return is_compressed(b) ? two_bits(b).sent : 1; }

int pack(Builder& b, int device, double bytes) {
  const int machine = b.machine_of(device);
  return is_compressed(b) ? b.process(device, machine, "encode", bytes * two_bits(b).encode)
                          : b.touch(device, machine, "pack", 2 * bytes);
}

// What says which keys a push has, and which of them have a value. Gloo sends what the receiver has asked for: a server asks for
// the second when it has the first, and for all parts of the values when it has both.
Ids announce_push(Builder& b, int device, int home, const Ids& after) {
  constexpr double kRequest = 130, kFlags = 10;  // bytes, about
  const int machine = b.machine_of(device);
  const int request = b.post(device, machine, home, "push", kRequest, after).arrived;
  const int flags = b.post(device, machine, home, "push", kFlags, {b.ask(home, machine, {request})}).arrived;
  return {b.ask(home, machine, {flags})};
}

// The parts of all workers.
void decode_all(Builder& b, int server, int home, double bytes, const Ids& pushed) {
  b.process(server, home, "decode", bytes * b.devices() * two_bits(b).decode, pushed);
}

}  // namespace

// A chunk's parts leave while the two chunks before it are under way.
void all_reduce(Builder& b, const Ids& actors, double bytes, const std::vector<Ids>& after) {
  const int n = b.machines(), inside = b.target().devices;
  const double chunk = std::clamp(bytes / 8, kLeastChunk, kMostChunk);
  const int chunks = std::max(1, static_cast<int>(std::ceil(bytes / chunk - 1e-9)));
  const double size = bytes / chunks;
  const bool one_round = n == 2 || bytes <= kOneRound;
  const double part = one_round ? size : size / n;  // that goes from one machine to another
  std::vector<Ids> before = after, shared(to_size(n));
  Ids parts, results;  // [chunk] once the parts, and the results, are on all machines
  for (int c = 0; c < chunks; ++c) {
    const std::vector<double> sizes = c == 0 ? std::vector{part, kSignature} : std::vector{part};
    Ids arrived;
    for (int m = 0; m < n; ++m) {
      if (inside > 1) before[to_size(m)] = {b.pass(m, (inside + 1) * size, before[to_size(m)])};
      Ids ready = before[to_size(m)];
      if (c == 0) append(ready, b.last(actors[to_size(m)]));
      if (c >= 2) ready.push_back(parts[to_size(c - 2)]);
      if (c >= 3) ready.push_back(results[to_size(c - 3)]);
      if (c == 0) ready = {b.start_exchange(m, ready)};
      arrived.push_back(b.exchange(actors[to_size(m)], m, "exchange", sizes, ready));
    }
    parts.push_back(b.join(arrived));
    Ids reduced;
    for (int m = 0; m < n; ++m) reduced.push_back(b.pass(m, (n + 1) * part, {parts.back()}));
    if (!one_round)
      for (int m = 0; m < n; ++m) {
        Ids ready{reduced[to_size(m)]};
        if (c >= 2) ready.push_back(results[to_size(c - 2)]);
        reduced[to_size(m)] = b.exchange(actors[to_size(m)], m, "exchange", {part}, ready);
      }
    results.push_back(b.join(reduced));
    for (int m = 0; m < n; ++m)
      shared[to_size(m)].push_back(inside > 1 ? b.pass(m, 2 * size * inside, {results.back()}) : results.back());
  }
  for (int m = 0; m < n; ++m) b.follow(actors[to_size(m)], shared[to_size(m)]);
}

void sum_up(Builder& b, double bytes) {
  if (b.machines() == 1) {
    b.meet(b.all_devices(), b.barrier());
    return;
  }
  meet_on_machines(b, b.barrier());
  all_reduce(b, first_devices(b), bytes, std::vector<Ids>(to_size(b.machines())));
  meet_on_machines(b, b.barrier());
}

std::vector<FullBucket> buckets_of(const Profile& profile, double limit) {
  std::vector<FullBucket> full;
  double bytes = 0;
  for (std::size_t module = profile.modules.size(); module-- > 0;) {
    bytes += static_cast<double>(profile.modules[module].bytes);
    if (bytes < limit && module > 0) continue;
    for (; bytes > 0; bytes -= full.back().bytes)
      full.push_back({.bytes = std::min(bytes, std::max(limit, 1.0)), .module = module});
  }
  return full;
}

std::vector<Ids> last_of_machines(const Builder& b) {
  std::vector<Ids> last(to_size(b.machines()));
  for (const int device : b.all_devices()) append(last[to_size(b.machine_of(device))], b.last(device));
  return last;
}

void forward_and_totals(Builder& b, const Ids& networks) {
  constexpr double kTotals = 80;  // gradient/exchange_totals.h
  for (const int device : b.all_devices()) b.compute(device, "forward", b.alone(b.samples_of(device)).forward);
  all_reduce(b, networks, kTotals, last_of_machines(b));
}

void backward_into_buckets(Builder& b, const std::vector<FullBucket>& buckets,
                           const std::function<void(const FullBucket&)>& when_full) {
  const std::vector<ModuleTimes>& modules = b.profile().modules;
  double all = 0;
  for (const ModuleTimes& module : modules) all += module.backward;
  auto next = buckets.begin();
  for (std::size_t i = modules.size(); i-- > 0;) {
    const auto bytes = static_cast<double>(modules[i].bytes);
    for (const int device : b.all_devices()) {
      b.compute(device, "backward " + modules[i].name,
                b.alone(b.samples_of(device)).backward * modules[i].backward / all);
      if (bytes > 0) b.touch(device, b.machine_of(device), "pack", 2 * bytes);
    }
    for (; next != buckets.end() && next->module == i; ++next) when_full(*next);
  }
}

void update_on_machines(Builder& b, const std::vector<Ids>& after) {
  for (int m = 0; m < b.machines(); ++m) {
    b.meet(b.devices_on(m), b.barrier(), after[to_size(m)]);
    for (const int device : b.devices_on(m)) {
      b.touch(device, m, "unpack", 2 * b.parameter_bytes());
      b.update(device, m, 1.0 / b.target().devices);
    }
    b.meet(b.devices_on(m), b.barrier());
  }
}

// Buckets fill while backward goes on, the last parameters first; a thread of each machine exchanges them in that order, after
// the number of samples. Gradients are copied into the buckets, and their means out of them.
void ddp_between_machines(Builder& b, const Ids& networks) {
  forward_and_totals(b, networks);
  const auto buckets = buckets_of(b.profile(), b.choice().bucket_bytes);
  std::vector<std::vector<Ids>> full;  // [bucket][machine] after what
  backward_into_buckets(b, buckets, [&](const FullBucket&) { full.push_back(last_of_machines(b)); });
  for (std::size_t i = 0; i < buckets.size(); ++i) all_reduce(b, networks, buckets[i].bytes, full[i]);
  std::vector<Ids> exchanged;
  for (const int network : networks) exchanged.push_back(b.last(network));
  update_on_machines(b, exchanged);
}

// Every device trains a replica; every h steps the replicas become one.
void averaging(Builder& b, const Ids& networks, int step) {
  constexpr double kLoss = 24, kSamples = 8;  // bytes that are summed up
  for (const int device : b.all_devices()) b.forward_and_backward(device);
  meet_on_machines(b, b.handover());
  if (b.machines() > 1) sum_up(b, kLoss);
  for (const int device : b.all_devices()) b.update(device, b.machine_of(device), 1);
  meet_on_machines(b, 2 * b.handover());
  if ((step + 1) % b.choice().average_every != 0) return;
  if (b.machines() > 1) sum_up(b, kSamples);
  const double bytes = b.parameter_bytes();
  for (const int device : b.all_devices())
    b.touch(device, b.machine_of(device), "collect", 3 * bytes + bytes / b.target().devices);
  meet_on_machines(b, b.handover());
  if (b.machines() > 1) {
    std::vector<Ids> ready;
    for (int m = 0; m < b.machines(); ++m) ready.push_back(b.last(m * b.target().devices));
    all_reduce(b, networks, bytes, ready);
    for (int m = 0; m < b.machines(); ++m) b.meet(b.devices_on(m), 0, b.last(networks[to_size(m)]));
  }
  for (const int device : b.all_devices())
    if (device % b.target().devices != 0) b.touch(device, b.machine_of(device), "copy", 2 * bytes);
  meet_on_machines(b, b.handover());
}

namespace {

// [part][device] its arrival at server s. Parts leave in their order, each as soon as it is packed.
std::vector<Ids> push_parts(Builder& b, int home, const std::vector<double>& parts) {
  std::vector<Ids> arrived(parts.size());
  std::vector<Ids> ready;  // [device] what its next part waits for
  for (const int device : b.all_devices()) ready.push_back(announce_push(b, device, home, b.last(device)));
  for (std::size_t part = 0; part < parts.size(); ++part)
    for (const int device : b.all_devices()) {
      Ids after{pack(b, device, parts[part])};
      append(after, ready[to_size(device)]);
      const Builder::Message push =
          b.post(device, b.machine_of(device), home, "push", parts[part] * sent_share(b), after);
      ready[to_size(device)] = {push.left};
      arrived[part].push_back(push.arrived);
    }
  return arrived;
}

// A part is merged when all workers have pushed it. The last one of them gets it at once, which is taken to be the last one on
// another machine; the others get it when the server has their next part, too.
void answer_parts(Builder& b, int server, int home, const std::vector<double>& parts, const std::vector<Ids>& pushed,
                  std::vector<Ids>& answers) {
  std::vector<Ids> left(to_size(b.devices()));  // what the next one on a connection waits for
  const int last = b.machine_of(b.devices() - 1) == home ? b.devices() - 1 - b.target().devices : b.devices() - 1;
  for (std::size_t part = 0; part < parts.size(); ++part) {
    if (is_compressed(b)) decode_all(b, server, home, parts[part], pushed[part]);
    b.update(server, home, parts[part] / b.parameter_bytes(), b.devices(), pushed[part]);
    for (const int device : b.all_devices()) {
      Ids after{b.touch(server, home, "copy", 2 * parts[part])};
      append(after, left[to_size(device)]);
      if (part + 1 < parts.size() && device != last) after.push_back(pushed[part + 1][to_size(device)]);
      const Builder::Message pull = b.post(server, home, b.machine_of(device), "pull", parts[part], after);
      left[to_size(device)] = {pull.left};
      answers[to_size(device)].push_back(pull.arrived);
    }
  }
}

}  // namespace

// docs/strategies/kvstore.md: parts of a gradient go to the servers, in their order, while later ones are packed; new values come
// back while later parts go. A server merges, updates and copies under one lock, for all workers.
void store_sync(Builder& b, const Ids& servers) {
  constexpr double kLoss = 24;
  for (const int device : b.all_devices()) b.forward_and_backward(device);
  sum_up(b, kLoss);
  const auto parts = parts_of_servers(b.profile(), static_cast<int>(servers.size()));
  std::vector<Ids> answers(to_size(b.devices()));
  for (std::size_t s = 0; s < servers.size(); ++s) {
    const int home = static_cast<int>(s) % b.machines();
    answer_parts(b, servers[s], home, parts[s], push_parts(b, home, parts[s]), answers);
  }
  for (const int device : b.all_devices())
    b.touch(device, b.machine_of(device), "unpack", 2 * b.parameter_bytes(), answers[to_size(device)]);
}

AsyncStore::AsyncStore(Builder& builder, const Ids& locks) : b_(builder), locks_(locks) {
  for (const auto& parts : parts_of_servers(b_.profile(), static_cast<int>(locks.size())))
    sizes_.push_back(std::accumulate(parts.begin(), parts.end(), 0.0));
}

int AsyncStore::push(int device, int server, const Ids& after) {
  const int machine = b_.machine_of(device);
  Ids before = b_.last(device);
  append(before, after);
  Ids ready = announce_push(b_, device, home(server), before);
  ready.push_back(b_.touch(device, machine, "pack", 2 * size(server), after));
  return b_.post(device, machine, home(server), "push", size(server), ready).arrived;
}

int AsyncStore::update(int device, int server, const Ids& after) {
  constexpr double kReply = 8;  // bytes
  const int done = b_.update_locked(locks_[to_size(server)], home(server), size(server) / b_.parameter_bytes(), after);
  return b_.post(device, home(server), b_.machine_of(device), "updated", kReply, {done}).arrived;
}

int AsyncStore::ask(int device, int server, const Ids& after) {
  constexpr double kRequest = 100;  // bytes, about
  return b_.post(device, b_.machine_of(device), home(server), "ask", kRequest, after).arrived;
}

int AsyncStore::pull(int device, int server, const Ids& asked, const Ids& ready) {
  constexpr double kReply = 8;  // bytes, before the values
  const int copied = b_.pass_locked(locks_[to_size(server)], home(server), 2 * size(server), asked);
  const int machine = b_.machine_of(device);
  Ids after{copied};
  if (!ready.empty()) after.push_back(b_.ask(machine, home(server), ready));
  const int reply = b_.post(device, home(server), machine, "pull", kReply, after).arrived;
  return b_.post(device, home(server), machine, "pull", size(server), {b_.ask(machine, home(server), {reply})}).arrived;
}

void AsyncStore::unpack(int device, const Ids& after) {
  b_.touch(device, b_.machine_of(device), "unpack", 2 * b_.parameter_bytes(), after);
}

// A worker pushes to all servers, hears of each that it has updated, then pulls from all. It waits for no other worker, but a
// server works for one at a time.
void store_async(Builder& b, const Ids& locks) {
  AsyncStore store(b, locks);
  for (const int device : b.all_devices()) {
    b.forward_and_backward(device);
    Ids updated, pulled;
    for (int s = 0; s < store.servers(); ++s) updated.push_back(store.update(device, s, {store.push(device, s)}));
    for (int s = 0; s < store.servers(); ++s) pulled = {store.pull(device, s, {store.ask(device, s, updated)}, pulled)};
    store.unpack(device, pulled);
  }
}

}  // namespace lockstep::plan
