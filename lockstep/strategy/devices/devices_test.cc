// SPDX-License-Identifier: Apache-2.0
#include "lockstep/devices.h"

#include <ATen/Parallel.h>
#include <torch/nn/functional/dropout.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <mutex>
#include <set>
#include <thread>

#include "lockstep/base/int_vector.h"
#include "lockstep/base/text.h"
#include "lockstep/data/loader/random.h"
#include "lockstep/deadline.h"
#include "lockstep/stop_all.h"
#include "lockstep/strategy/devices/devices_state.h"
#include "lockstep/strategy/devices/thread_generator.h"
#include "tests/strategies.h"
#include "tests/support.h"

namespace lockstep {
namespace {

using testing::contains;
using testing::message_of;
using testing::test_places;

using namespace std::chrono_literals;

class DevicesOfSize : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Sizes, DevicesOfSize, ::testing::Values(1, 2, 3, 4, 7));

TEST_P(DevicesOfSize, run_a_function_once_on_each_thread) {
  Devices devices({.count = GetParam()});
  IntVector<std::thread::id> threads(GetParam());
  for (int round = 0; round < 3; ++round) {
    IntVector<int> calls(GetParam());
    devices.run([&](Device& device) {
      const int i = device.index();
      ++calls[i];
      if (round > 0) {
        EXPECT_EQ(threads[i], std::this_thread::get_id());
      }
      threads[i] = std::this_thread::get_id();
    });
    EXPECT_EQ(calls, IntVector<int>(GetParam(), 1));
  }
  EXPECT_EQ(std::set(threads.begin(), threads.end()).size(), threads.elements().size());
}

TEST_P(DevicesOfSize, divide_a_range_among_their_threads) {
  Devices devices({.count = GetParam()});
  for (const int64_t count : {0, 1, 5, 1000}) {
    const torch::Tensor visits = torch::zeros({10 + count}, torch::kInt64);  // each element is written by one thread
    devices.parallel_for(10, 10 + count, 1, [&](int64_t first, int64_t last) { visits.slice(0, first, last).add_(1); });
    EXPECT_TRUE(visits.slice(0, 0, 10).eq(0).all().item<bool>());
    EXPECT_TRUE(visits.slice(0, 10).eq(1).all().item<bool>()) << count;
  }
}

TEST(Devices, divide_a_range_among_the_cores_of_a_device) {
  const int before = at::get_num_threads();
  at::set_num_threads(static_cast<int>(usable_cores().size()));  // at most so many, as the test below holds
  Devices devices({.count = 1});
  at::set_num_threads(before);
  std::mutex mutex;
  std::set<std::thread::id> threads;
  devices.parallel_for(0, 1000, 1, [&](int64_t, int64_t) {
    const std::lock_guard lock(mutex);
    threads.insert(std::this_thread::get_id());
  });
  EXPECT_EQ(threads.size(), usable_cores().size());
}

TEST_P(DevicesOfSize, reduce_with_every_algorithm) {
  Devices devices({.count = GetParam(), .places = test_places(GetParam())});
  const double sum = GetParam() * (GetParam() + 1) / 2;
  using enum Algorithm;
  for (const auto algorithm : {kDirect, kCentral, kRing, kTree}) {
    devices.run([sum, algorithm](Device& device) {
      const torch::Tensor tensor =
          torch::full({3, 5}, device.index() + 1, torch::TensorOptions(torch::kFloat64).device(device.where()));
      device.all_reduce(tensor, algorithm);
      EXPECT_TRUE(tensor.eq(sum).all().item<bool>());
    });
  }
}

TEST_P(DevicesOfSize, reduce_onto_one_and_broadcast_from_one) {
  Devices devices({.count = GetParam(), .places = test_places(GetParam())});
  devices.run([n = GetParam()](Device& device) {
    const torch::Tensor tensor = torch::full({4}, device.index() + 1, torch::TensorOptions().device(device.where()));
    device.reduce(tensor);
    EXPECT_TRUE(tensor.eq(device.index() == 0 ? n * (n + 1) / 2 : device.index() + 1).all().item<bool>());
    device.barrier();
    device.broadcast(tensor, n - 1);
    EXPECT_TRUE(tensor.eq(n == 1 ? 1 : n).all().item<bool>());
  });
}

TEST(Devices, refuse_a_tensor_of_another_device_and_name_both) {
  Devices devices({.count = 1, .places = test_places(1)});
  const auto mixed = [&] { devices.run([](Device& device) { device.all_reduce(torch::empty({2}, torch::kMeta)); }); };
  EXPECT_TRUE(
      contains(message_of<DeviceError>(mixed), concat("is on meta, but ", devices.where(0).str(), " is needed")));
}

TEST(Devices, that_call_different_collectives_get_an_error) {
  Devices devices({.count = 2, .places = test_places(2)});
  const auto differ = [](Device& device) {
    device.all_reduce(torch::ones({2 + device.index()}, torch::TensorOptions().device(device.where())));
  };
  EXPECT_TRUE(contains(message_of<MismatchError>([&] { devices.run(differ); }), "all_reduce of 2"));
}

TEST(Devices, are_disjoint_sets_of_cores_with_names) {
  Devices devices({.count = 2, .cores = usable_cores()});
  EXPECT_EQ(devices.names(), (std::vector<std::string>{"cpu:0", "cpu:1"}));
  IntVector<CoreSet> cores(2);
  devices.run([&](Device& device) { cores[device.index()] = usable_cores(); });
  if (usable_cores().size() >= 2) {
    for (const int core : cores[0]) EXPECT_EQ(std::count(cores[1].begin(), cores[1].end(), core), 0);
  }
}

TEST(Devices, end_all_with_the_exception_of_one) {
  Devices devices({.count = 3});
  const auto throw_on_1 = [](Device& device) {
    if (device.index() == 1) throw DataError({.what = "thrown on a device"});
    device.barrier();
  };
  const Stopwatch watch;
  EXPECT_TRUE(contains(message_of<DataError>([&] { devices.run(throw_on_1); }), "thrown on a device"));
  EXPECT_LT(watch.seconds(), testing::kAtOnce);
  EXPECT_TRUE(contains(message_of<UsageError>([&] { devices.run(throw_on_1); }), "after one of them failed"));
}

TEST(Devices, stop_waiting_when_another_device_throws) {
  Devices devices({.count = 2});
  const Stopwatch watch;
  const auto body = [&](Device& device) {
    if (device.index() == 1) throw DataError({.what = "thrown on a device"});
    DevicesState::of(device).wait_on(device, "a signal", [] { return false; });
  };
  EXPECT_TRUE(contains(message_of<DataError>([&] { devices.run(body); }), "thrown on a device"));
  EXPECT_LT(watch.seconds(), testing::kAtOnce);
}

TEST(Devices, end_when_any_thread_calls_stop) {
  Devices devices({.count = 3}), idle({.count = 1});
  std::atomic<int> waiting{0};
  std::thread elsewhere([&] {
    while (waiting < 2) std::this_thread::yield();
    stop("enough");
  });
  const std::string message = message_of<PeerLost>([&] {
    devices.run([&](Device& device) {
      if (device.index() == 2) return;
      ++waiting;
      device.barrier();
    });
  });
  elsewhere.join();
  EXPECT_TRUE(contains(message, "the devices were stopped: enough"));
  EXPECT_TRUE(contains(message_of<PeerLost>([&] { idle.run([](Device&) {}); }), "enough"));
  Devices later({.count = 2});
  later.run([](Device& device) { device.barrier(); });
}

TEST(Devices, name_the_one_that_is_too_slow) {
  std::atomic<bool> go_on{false};
  Devices devices({.count = 2, .timeout = 200ms});
  const Stopwatch watch;
  const auto body = [&go_on](Device& device) {
    while (device.index() == 1 && !go_on) std::this_thread::yield();
  };
  EXPECT_TRUE(contains(message_of<PeerLost>([&] { devices.run(body); }), "cpu:1 is not done within 200.0 ms"));
  EXPECT_GE(watch.seconds(), 0.2);
  EXPECT_LT(watch.seconds(), testing::kAtOnce);
  EXPECT_EQ(Devices::left_behind(), 0);
  go_on = true;
}

TEST(Devices, have_a_thread_for_each_core_but_not_more_than_their_maker) {
  const int before = at::get_num_threads();
  const int cores = static_cast<int>(usable_cores().size());
  for (const int most : {1, cores, cores + 1}) {
    at::set_num_threads(most);
    int threads = 0;
    Devices({.count = 1}).run([&](Device&) { threads = at::get_num_threads(); });
    EXPECT_EQ(threads, std::min(most, cores));
  }
  at::set_num_threads(before);
}

TEST(Devices, count_the_threads_that_outlive_them) {
  const auto go_on = std::make_shared<std::atomic<bool>>(false);
  const auto body = [go_on](Device& device) {
    while (device.index() == 1 && !*go_on) std::this_thread::yield();
  };
  EXPECT_THROW(Devices({.count = 2, .timeout = 50ms}).run(body), PeerLost);
  EXPECT_EQ(Devices::left_behind(), 1);
  *go_on = true;
  const Deadline deadline = Deadline::after(10s);
  while (Devices::left_behind() > 0 && !deadline.passed()) std::this_thread::yield();
  EXPECT_EQ(Devices::left_behind(), 0);
}

TEST(Devices, stop_at_once_when_idle) {
  const Stopwatch watch;
  for (int round = 0; round < 20; ++round) Devices({.count = 4}).run([](Device&) {});
  EXPECT_LT(watch.seconds(), testing::kAtOnce);
}

// The elements that dropout keeps, as a number.
double pattern() {
  const auto options = torch::nn::functional::DropoutFuncOptions().p(0.5);
  const torch::Tensor kept = torch::nn::functional::dropout(torch::ones({50}, torch::kFloat64), options).gt(0);
  return kept.to(torch::kFloat64).mul(torch::arange(50).to(torch::kFloat64).exp2()).sum().item<double>();
}

IntVector<double> patterns(int count, uint64_t seed) {
  Devices devices({.count = count});
  IntVector<double> found(count);
  devices.run([&](Device& device) {
    device.seed(mix_seed(seed, device.index()));
    for (int i = 0; i < 3; ++i) found[device.index()] += pattern();
  });
  return found;
}

TEST(ThreadGenerator, makes_dropout_differ_between_devices_and_repeat_with_the_seed) {
  const auto once = patterns(4, 7);
  EXPECT_EQ(once, patterns(4, 7));
  EXPECT_NE(once, patterns(4, 8));
  EXPECT_EQ(std::set<double>(once.begin(), once.end()).size(), 4U);
  EXPECT_EQ(once[0], patterns(1, 7)[0]);  // whatever the other devices do
}

TEST(ThreadGenerator, leaves_torchs_own_generator_alone) {
  torch::manual_seed(5);
  const double before = pattern();
  torch::manual_seed(5);
  static_cast<void>(patterns(2, 7));
  EXPECT_EQ(pattern(), before);
}

// One draw by each family of torch's random functions.
std::vector<torch::Tensor> draw_everything() {
  const torch::Tensor ones = torch::ones({20});
  return {torch::rand({20}),
          torch::randn({20}, torch::kFloat64),
          torch::randint(1000, {20}),
          torch::randperm(20),
          torch::normal(0.0, 1.0, {20}),
          torch::bernoulli(ones * 0.5),
          torch::multinomial(ones, 20),
          torch::poisson(ones * 50),
          torch::dropout(ones, 0.5, /*train=*/true),
          torch::rrelu(-ones, 0.1, 0.9, /*training=*/true),
          torch::empty({20}).exponential_(),
          torch::empty({20}).cauchy_(),
          torch::empty({20}).geometric_(0.01),
          torch::nn::init::kaiming_uniform_(torch::empty({4, 5}))};
}

TEST(ThreadGenerator, decides_every_random_number_of_torch) {
  const auto draw = [](uint64_t torchs_seed) {
    torch::manual_seed(torchs_seed);
    const ThreadGenerator generator(7);
    return draw_everything();
  };
  const auto first = draw(5);
  const torch::Tensor next = torch::rand({20});
  const auto again = draw(6);
  torch::manual_seed(5);
  EXPECT_TRUE(next.equal(torch::rand({20})));  // torch's own generator has not moved
  const auto others = draw_everything();
  for (size_t i = 0; i < first.size(); ++i) {
    EXPECT_TRUE(first[i].equal(again[i])) << "function " << i;
    EXPECT_FALSE(first[i].equal(others[i])) << "function " << i;
  }
}

// Runs in a process of its own: the first ThreadGenerator reads the variable.
TEST(ThreadGenerator, can_be_switched_off) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto draw_with_torchs_generator = [] {
    ::setenv("LOCKSTEP_THREAD_GENERATORS", "0", 1);
    torch::manual_seed(5);
    const double before = pattern();
    torch::manual_seed(5);
    const ThreadGenerator generator(7);
    std::_Exit(pattern() == before ? 0 : 1);
  };
  EXPECT_EXIT(draw_with_torchs_generator(), ::testing::ExitedWithCode(0), "");
}

}  // namespace
}  // namespace lockstep
