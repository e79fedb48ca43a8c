// SPDX-License-Identifier: Apache-2.0
#include "lockstep/plan/measure_messages.h"

#include <time.h>

#include <algorithm>
#include <array>
#include <functional>
#include <memory>
#include <numeric>
#include <vector>

#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "lockstep/base/median.h"
#include "lockstep/base/text.h"
#include "lockstep/collective/machines/hierarchy.h"
#include "lockstep/collective/shm/connect/rendezvous_server.h"
#include "lockstep/collective/world/world_state.h"
#include "lockstep/deadline.h"
#include "lockstep/plan/measured_steps.h"

namespace lockstep::plan {
namespace {

constexpr std::array kMessages{1 << 10, 1 << 15, 1 << 20, 1 << 23};  // bytes that are all-reduced
constexpr int kManyRounds = 300;                                     // of what takes microseconds

double cpu_seconds() {  // of this process
  timespec time{};
  ::clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_nsec) / 1e9;
}

std::vector<SizedTime> all_reduce_times(const World& world) {
  constexpr int kTimed = 10, kTimedIfSmall = 60;  // small ones vary most
  std::vector<SizedTime> times;
  for (const std::int64_t bytes : kMessages) {
    const torch::Tensor data = world.allocate({bytes / 4}, torch::kFloat32).zero_();
    std::vector<double> seconds;
    for (int i = 0; i < (bytes < 1 << 20 ? kTimedIfSmall : kTimed); ++i) {
      world.barrier();
      const Stopwatch watch;
      world.all_reduce(data);
      seconds.push_back(largest_of(world, watch.seconds()));
    }
    times.push_back({.bytes = static_cast<double>(bytes), .seconds = median(seconds)});
  }
  return times;
}

// What cores do for an all_reduce of so many bytes, in all threads of this process.
std::vector<SizedTime> all_reduce_work(const World& world, const std::vector<SizedTime>& sizes) {
  constexpr double kFor = 0.1;  // seconds
  std::vector<SizedTime> work;
  for (const SizedTime& size : sizes) {
    const torch::Tensor data = world.allocate({static_cast<std::int64_t>(size.bytes) / 4}, torch::kFloat32).zero_();
    const int rounds = std::clamp(static_cast<int>(kFor / size.seconds), 5, kManyRounds);
    world.barrier();
    const double before = cpu_seconds();
    for (int i = 0; i < rounds; ++i) world.all_reduce(data);
    world.barrier();
    work.push_back({.bytes = size.bytes, .seconds = (cpu_seconds() - before) / rounds});
  }
  return work;
}

// Runs `body` in threads of this process, each of which counts as a machine: Gloo between them, over loopback.
void run_machines(int count, const std::function<void(World&)>& body) {
  std::vector<int> machines(static_cast<std::size_t>(count));
  std::iota(machines.begin(), machines.end(), 0);
  const auto store = c10::make_intrusive<c10d::HashStore>();
  const auto connect = [&](int rank) -> std::unique_ptr<Transport> {
    auto inside = shm::make_thread_group(1, {.timeout = std::chrono::seconds(30), .job_ranks = {rank}});
    return std::make_unique<Hierarchy>(
        std::move(inside[0]), Topology{machines}, store,
        TransportOptions{.rank = rank, .size = count, .describe = concat("rank ", rank)});
  };
  run_threads(machines, connect, body, {.timeout = std::chrono::seconds(30)});
}

// How long a small message takes, and how much of the cores: to and fro, each waited for. The receiver asks for it before the one
// that it answers leaves, as Gloo sends only what was asked for.
void measure_waited_for(const World& link, Profile& profile) {
  const torch::Tensor data = torch::zeros({64}, torch::kUInt8), received = torch::zeros_like(data);
  const int other = 1 - link.rank();
  const auto play = [&](int rounds) {
    const auto ask = [&] { return link.receive_async(received, {.from = other}); };
    Work next = ask();
    for (int i = 0; i < rounds; ++i) {
      if (i % 2 == link.rank()) {
        link.send(data, other);
        continue;
      }
      next.wait();
      if (i + 2 < rounds) next = ask();
    }
  };
  play(10);
  link.barrier();
  const double before = cpu_seconds();
  const Stopwatch watch;
  play(kManyRounds);
  if (link.rank() != 0) return;
  profile.message = watch.seconds() / kManyRounds;
  profile.message_work = (cpu_seconds() - before) / kManyRounds;
}

// Work of each of many messages that are under way at the same time, in both directions.
void measure_many(const World& link, Profile& profile) {
  constexpr int kAtOnce = 32, kTimes = 30;
  const torch::Tensor data = torch::zeros({64}, torch::kUInt8), received = torch::zeros({kAtOnce, 64}, torch::kUInt8);
  const int other = 1 - link.rank();
  const auto exchange = [&] {
    std::vector<Work> all;
    for (int i = 0; i < kAtOnce; ++i) all.push_back(link.receive_async(received[i], {.from = other, .tag = i}));
    link.barrier();
    for (int i = 0; i < kAtOnce; ++i) all.push_back(link.send_async(data, other, i));
    for (Work& each : all) each.wait();
  };
  exchange();
  link.barrier();
  const double before = cpu_seconds();
  for (int i = 0; i < kTimes; ++i) exchange();
  if (link.rank() == 0) profile.message_work_of_many = (cpu_seconds() - before) / (2 * kAtOnce * kTimes);
}

// Links as a store makes them (strategy/kvstore/link.h), with what sending and receiving keeps. Both ends are in this process.
void measure_links(const World& world, Profile& profile) {
  constexpr int kLinks = 4, kBytes = 1 << 16;
  const torch::Tensor data = torch::zeros({kBytes}, torch::kUInt8), received = torch::zeros_like(data);
  const int other = 1 - world.rank();
  world.barrier();
  const double before = own_bytes();
  world.barrier();
  std::vector<World> links;
  for (int i = 0; i < kLinks; ++i) links.push_back(*world.separate({0, 1}));
  for (const World& link : links) {
    Work sent = link.send_async(data, other);
    link.receive(received, {.from = other});
    sent.wait();
  }
  world.barrier();
  if (world.rank() == 0) profile.store_link_bytes = std::max(0.0, own_bytes() - before) / (2 * kLinks);
  world.barrier();
  measure_waited_for(links.front(), profile);
  measure_many(links.front(), profile);
}

}  // namespace

void measure_loopback(Profile& profile) {
  constexpr double kAbout = 1e-3;  // seconds, which decides how often it is done
  double of_two = 0;               // bytes, with all that is made once in a process
  run_machines(2, [&](World& world) {
    all_reduce_work(world, {{.bytes = kMessages.front(), .seconds = kAbout}});
    if (world.rank() == 0) of_two = own_bytes();
  });
  run_machines(4, [&](World& world) {
    all_reduce_work(world, {{.bytes = kMessages.front(), .seconds = kAbout}});
    if (world.rank() > 0) return;
    constexpr int kOfEachPair = 2;  // one between all ranks, one between machines
    profile.connection_bytes = std::max(0.0, own_bytes() - of_two) / (4 * 3 - 2) / kOfEachPair;
  });
  run_machines(2, [&](World& world) {
    const auto times = all_reduce_times(world);
    const auto work = all_reduce_work(world, times);
    if (world.rank() > 0) return;
    profile.loopback = times;
    profile.loopback_work = work;
  });
}

void measure_messages(Profile& profile) {
  run_machines(2, [&](World& world) { measure_links(world, profile); });
}

}  // namespace lockstep::plan
