// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>

#include "lockstep/plan/strategy_schedules.h"
#include "lockstep/strategy/option_names.h"

namespace lockstep::plan {
namespace {

constexpr double kOneRound = 16.0 * 1024;  // collective/machines/all_reduce.cc: up to here one round between machines
constexpr double kLeastChunk = 512.0 * 1024;    // an all_reduce between machines goes in eighths, but not below this,
constexpr double kMostChunk = 4.0 * (1 << 20);  // nor above this
constexpr int kParts = 16;                      // in which a gradient goes to a server in step

bool is_compressed(const Builder& b) { return b.choice().compression != Compression::kNone; }

const CompressionTimes& two_bits(const Builder& b) {
  return compression_for(b.profile(), name_of(b.choice().compression));
}

double sent_share(const Builder& b) { return is_compressed(b) ? two_bits(b).sent : 1; }

int pack(Builder& b, int device, double bytes) {
  const int machine = b.machine_of(device);
  return is_compressed(b) ? b.compute(device, machine, "encode", bytes * two_bits(b).encode)
                          : b.touch(device, machine, "pack", 2 * bytes);
}

// The parts of all workers.
void decode_all(Builder& b, int server, int home, double bytes, const Ids& pushed) {
  b.compute(server, home, "decode", bytes * b.devices() * two_bits(b).decode, pushed);
}

}  // namespace

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

void backward_into_buckets(Builder& b, const std::vector<FullBucket>& buckets,
                           const std::function<void(const FullBucket&)>& when_full) {
  const std::vector<ModuleTimes>& modules = b.profile().modules;
  double all = 0;
  for (const ModuleTimes& module : modules) all += module.backward;
  auto next = buckets.begin();
  for (std::size_t i = modules.size(); i-- > 0;) {
    for (const int device : b.all_devices())
      b.compute(device, b.machine_of(device), "backward " + modules[i].name,
                b.alone(b.samples_of(device)).backward * modules[i].backward / all);
    for (; next != buckets.end() && next->module == i; ++next) when_full(*next);
  }
}

std::vector<Ids> last_of_machines(const Builder& b) {
  std::vector<Ids> last(at(b.machines()));
  for (const int device : b.all_devices())
    for (const int activity : b.last(device)) last[at(b.machine_of(device))].push_back(activity);
  return last;
}

void update_on_machines(Builder& b, const std::vector<Ids>& after) {
  for (int m = 0; m < b.machines(); ++m) {
    b.meet(b.devices_on(m), b.barrier(), after[at(m)]);
    for (const int device : b.devices_on(m)) b.touch(device, m, "update", b.update_bytes(1) / b.target().devices);
    b.meet(b.devices_on(m), b.barrier());
  }
}

// Buckets fill while backward goes on, the last parameters first; a thread of each machine exchanges them in that order.
void ddp_between_machines(Builder& b, const Ids& networks) {
  for (const int device : b.all_devices())
    b.compute(device, b.machine_of(device), "forward", b.alone(b.samples_of(device)).forward);
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
        const int packed = pack(b, device, size);
        pushed.push_back(b.send(device, machine, home, "push", size * sent_share(b)));
        sent[at(device)] = {machine == home ? pushed.back()
                                            : packed};  // a message goes on while the next part is packed
      }
      if (is_compressed(b)) decode_all(b, servers[at(s)], home, size, pushed);
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

}  // namespace lockstep::plan
