#include "lockstep/devices.h"

#include <torch/nn/functional/dropout.h>

#include <atomic>
#include <mutex>
#include <set>
#include <thread>

#include "lockstep/strategy/devices/thread_generator.h"
#include "tests/support.h"

namespace lockstep {
namespace {

using testing::contains;
using testing::message_of;

using namespace std::chrono_literals;

class DevicesOfSize : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Sizes, DevicesOfSize, ::testing::Values(1, 2, 3, 4, 7));

TEST_P(DevicesOfSize, run_a_function_once_on_each_thread) {
  Devices devices({.count = GetParam()});
  std::vector<std::thread::id> threads(static_cast<std::size_t>(GetParam()));
  for (int round = 0; round < 3; ++round) {
    std::vector<int> calls(threads.size());
    devices.run([&](Device& device) {
      const auto i = static_cast<std::size_t>(device.index());
      ++calls[i];
      if (round > 0) {
        EXPECT_EQ(threads[i], std::this_thread::get_id());
      }
      threads[i] = std::this_thread::get_id();
    });
    EXPECT_EQ(calls, std::vector<int>(threads.size(), 1));
  }
  EXPECT_EQ(std::set<std::thread::id>(threads.begin(), threads.end()).size(), threads.size());
}

TEST_P(DevicesOfSize, share_a_range_between_their_threads) {
  Devices devices({.count = GetParam()});
  for (const std::int64_t count : {0, 1, 5, 1000}) {
    std::vector<std::atomic<int>> visits(static_cast<std::size_t>(count) + 10);
    devices.parallel_for(10, 10 + count, 1, [&](std::int64_t first, std::int64_t last) {
      for (std::int64_t i = first; i < last; ++i) ++visits[static_cast<std::size_t>(i)];
    });
    for (std::size_t i = 0; i < visits.size(); ++i) EXPECT_EQ(visits[i], i < 10 ? 0 : 1) << i << " of " << count;
  }
}

TEST(Devices, share_a_range_between_the_cores_of_a_device) {
  Devices devices({.count = 1});
  std::mutex mutex;
  std::set<std::thread::id> threads;
  devices.parallel_for(0, 1000, 1, [&](std::int64_t, std::int64_t) {
    const std::lock_guard lock(mutex);
    threads.insert(std::this_thread::get_id());
  });
  EXPECT_EQ(threads.size(), usable_cores().size());
}

TEST_P(DevicesOfSize, reduce_with_every_algorithm) {
  Devices devices({.count = GetParam()});
  const double sum = GetParam() * (GetParam() + 1) / 2;
  using enum shm::Algorithm;
  for (const auto algorithm : {kDirect, kCentral, kRing, kTree}) {
    devices.run([sum, algorithm](Device& device) {
      const torch::Tensor tensor = torch::full({3, 5}, device.index() + 1, torch::kFloat64);
      device.all_reduce(tensor, algorithm);
      EXPECT_TRUE(tensor.eq(sum).all().item<bool>());
    });
  }
}

TEST_P(DevicesOfSize, reduce_onto_one_and_broadcast_from_one) {
  Devices devices({.count = GetParam()});
  devices.run([n = GetParam()](Device& device) {
    const torch::Tensor tensor = torch::full({4}, device.index() + 1);
    device.reduce(tensor);
    EXPECT_TRUE(tensor.eq(device.index() == 0 ? n * (n + 1) / 2 : device.index() + 1).all().item<bool>());
    device.barrier();
    device.broadcast(tensor, n - 1);
    EXPECT_TRUE(tensor.eq(n == 1 ? 1 : n).all().item<bool>());
  });
}

TEST(Devices, are_disjoint_sets_of_cores_with_names) {
  Devices devices({.count = 2, .cores = usable_cores()});
  EXPECT_EQ(devices.names(), (std::vector<std::string>{"cpu:0", "cpu:1"}));
  std::vector<CoreSet> cores(2);
  devices.run([&](Device& device) { cores[static_cast<std::size_t>(device.index())] = usable_cores(); });
  if (usable_cores().size() >= 2) {
    for (const int core : cores[0]) EXPECT_EQ(std::count(cores[1].begin(), cores[1].end(), core), 0);
  }
}

TEST(S4_devices, end_all_with_the_exception_of_one) {
  Devices devices({.count = 3});
  const auto throw_on_1 = [](Device& device) {
    if (device.index() == 1) throw DataError({.what = "thrown on a device"});
    device.barrier();
  };
  const Stopwatch watch;
  EXPECT_TRUE(contains(message_of<DataError>([&] { devices.run(throw_on_1); }), "thrown on a device"));
  EXPECT_LT(watch.seconds(), 1);
  EXPECT_TRUE(contains(message_of<UsageError>([&] { devices.run(throw_on_1); }), "after one of them failed"));
}

TEST(S4_devices, end_a_wait_for_a_signal_when_another_device_throws) {
  Devices devices({.count = 2});
  shm::Flag never;
  const Stopwatch watch;
  const auto body = [&](Device& device) {
    if (device.index() == 1) throw DataError({.what = "thrown on a device"});
    device.wait(never, "a signal", [&] { return never.reached(1); });
  };
  EXPECT_TRUE(contains(message_of<DataError>([&] { devices.run(body); }), "thrown on a device"));
  EXPECT_LT(watch.seconds(), 1);
}

TEST(S4_devices, name_a_device_that_is_too_slow_within_the_timeout) {
  std::atomic<bool> go_on{false};
  Devices devices({.count = 2, .timeout = 200ms});
  const Stopwatch watch;
  const auto body = [&go_on](Device& device) {
    while (device.index() == 1 && !go_on) std::this_thread::yield();
  };
  EXPECT_TRUE(contains(message_of<PeerLost>([&] { devices.run(body); }), "cpu:1 is not done within 200.0 ms"));
  EXPECT_GE(watch.seconds(), 0.2);
  EXPECT_LT(watch.seconds(), 1);
  go_on = true;
}

TEST(S4_devices, stop_at_once_when_idle) {
  const Stopwatch watch;
  for (int round = 0; round < 20; ++round) Devices({.count = 4}).run([](Device&) {});
  EXPECT_LT(watch.seconds(), 2);
}

// What dropout keeps, as a number.
double pattern() {
  const auto options = torch::nn::functional::DropoutFuncOptions().p(0.5);
  const torch::Tensor kept = torch::nn::functional::dropout(torch::ones({50}, torch::kFloat64), options).gt(0);
  return kept.to(torch::kFloat64).mul(torch::arange(50).to(torch::kFloat64).exp2()).sum().item<double>();
}

std::vector<double> patterns(int count, std::uint64_t seed) {
  Devices devices({.count = count});
  std::vector<double> found(static_cast<std::size_t>(count));
  devices.run([&](Device& device) {
    device.seed(seed_of(seed, device.index()));
    for (int i = 0; i < 3; ++i) found[static_cast<std::size_t>(device.index())] += pattern();
  });
  return found;
}

TEST(S0_dropout, differs_between_devices_and_repeats_with_the_seed) {
  const auto once = patterns(4, 7);
  EXPECT_EQ(once, patterns(4, 7));
  EXPECT_NE(once, patterns(4, 8));
  EXPECT_EQ(std::set<double>(once.begin(), once.end()).size(), 4U);
  EXPECT_EQ(once[0], patterns(1, 7)[0]);  // whatever the others do
}

TEST(S0_dropout, leaves_torchs_own_generator_alone) {
  torch::manual_seed(5);
  const double before = pattern();
  torch::manual_seed(5);
  static_cast<void>(patterns(2, 7));
  EXPECT_EQ(pattern(), before);
}

}  // namespace
}  // namespace lockstep
