// SPDX-License-Identifier: Apache-2.0
// The strategy `kvstore` between ranks that are threads: servers and workers go through the same loop.
#include <torch/nn/modules/batchnorm.h>

#include <array>
#include <atomic>
#include <cmath>
#include <map>
#include <memory>
#include <mutex>
#include <thread>

#include "lockstep/base/text.h"
#include "lockstep/deadline.h"
#include "lockstep/model/parameters.h"
#include "lockstep/sampler.h"
#include "lockstep/strategy.h"
#include "lockstep/strategy/option_names.h"
#include "tests/shm/support.h"
#include "tests/strategies.h"
#include "tests/support.h"

namespace lockstep {
namespace {

using namespace testing;

StrategyOptions dist(const std::string& kind, int servers = 1) {
  return {.kind = StrategyKind::kKVStore,
          .optimizer = SGDOptions{.lr = 0.1, .momentum = 0.9, .nesterov = true},
          .seed = 4,
          .timeout = std::chrono::seconds(20),
          .kvstore = {.kind = value_named<KVStoreKind>(kind, "--kvstore"), .servers = servers, .split_above = 40}};
}

using Step = std::function<void(const World& world, Strategy& strategy, int step)>;

// As the training loop does it. Returns what rank 0 has in the end, and its report.
struct Trained {
  Course course;
  std::map<std::string, double> report;
  std::string table;
};
Trained train(
    int workers, const StrategyOptions& options, const Task& task = small_task(), int steps = kSteps,
    int64_t samples = kBatch, const Step& before = [](const World&, Strategy&, int) {}) {
  Trained trained;
  run_ranks(options.kvstore.servers + workers, [&](World& world) {
    StrategyOptions mine = options;
    if (world.rank() >= options.kvstore.servers) {
      mine.devices = 1 + (world.rank() - options.kvstore.servers) % options.devices;
      mine.places = test_places(mine.devices);
    }
    const auto strategy = make_strategy(world, task, mine);
    const World share = strategy->ranks(world).data;
    Course course;
    for (int step = 0; step < steps; ++step) {
      before(world, *strategy, step);
      course.losses.push_back(strategy->forward_backward(part_of(batch_of(step, samples), *strategy, share)).mean_loss);
      strategy->update();
    }
    strategy->synchronise();
    course.parameters = values_of(strategy->model());
    if (world.rank() > 0) return;
    const Report report = strategy->report();
    trained = {.course = course, .report = {report.begin(), report.end()}, .table = strategy->table()};
  });
  return trained;
}

class DistSyncOfSize : public ::testing::TestWithParam<std::tuple<int, int>> {};
INSTANTIATE_TEST_SUITE_P(Sizes, DistSyncOfSize,
                         ::testing::Combine(::testing::Values(1, 2), ::testing::Values(1, 2, 3, 4)),
                         [](const auto& test) {
                           return lockstep::concat(std::get<0>(test.param), "_servers_", std::get<1>(test.param),
                                                   "_workers");
                         });

TEST_P(DistSyncOfSize, trains_as_one_device_does_when_servers_update) {
  const auto [servers, workers] = GetParam();
  const Trained trained = train(workers, dist("dist_sync", servers));
  expect_same_course(trained.course, on_one_device(small_task(), dist("dist_sync")));
}

TEST_P(DistSyncOfSize, trains_as_one_device_does_when_workers_update) {
  const auto [servers, workers] = GetParam();
  StrategyOptions options = dist("dist_sync", servers);
  options.kvstore.update_on_kvstore = false;
  options.optimizer = AdamWOptions{};
  expect_same_course(train(workers, options).course, on_one_device(small_task(), options));
}

TEST(DistSync, trains_as_one_device_does_with_different_numbers_of_devices_per_worker) {
  StrategyOptions options = dist("dist_sync", 2);
  options.devices = 2;  // workers have 1, 2 and 1
  options.optimizer = LAMBOptions{};
  const Trained trained = train(3, options);
  expect_same_course(trained.course, on_one_device(small_task(), options));
}

TEST(DistSync, takes_b_over_k_examples_per_device_and_b_times_n_per_update_without_delay) {
  StrategyOptions options = dist("dist_sync");
  options.devices = 2;
  const Trained trained = train(2, options, small_task(), 5, 16);  // workers of 1 and 2 devices: b = 8
  EXPECT_EQ(trained.report.at("examples_per_update"), 16);
  EXPECT_EQ(trained.report.at("examples_per_device"), 8);
  EXPECT_EQ(trained.report.at("max_delay"), 0);
  EXPECT_EQ(trained.report.at("updates"), 5);
  EXPECT_TRUE(
      contains(trained.table,
               "dist_sync                    1-2         2                   4-8                    16           0"));
}

double distance(const Course& one, const Course& other) {
  double sum = 0;
  for (size_t i = 0; i < one.parameters.size(); ++i)
    sum += (one.parameters[i] - other.parameters[i]).square().sum().item<double>();
  return std::sqrt(sum);
}

// Two bits train a little differently: residuals are still to be sent at the end.
TEST(DistSync, trains_with_two_bit_gradients) {
  StrategyOptions options = dist("dist_sync", 2);
  options.optimizer = SGDOptions{.lr = 0.1};
  options.compression = {.kind = Compression::kTwoBit, .amount = 0.05};
  const Course exact = on_one_device(small_task(), options, 30);
  const Course start = on_one_device(small_task(), options, 0);
  const double off = distance(train(2, options, small_task(), 30).course, exact);
  EXPECT_GT(off, 0);
  EXPECT_LT(off, 0.3 * distance(start, exact));
}

// Batch normalisation: all buffers are the mean over the workers.
TEST(DistSync, keeps_buffers_equal) {
  Task task = small_task();
  task.make_model = [] {
    torch::nn::Sequential net(torch::nn::Linear(6, 4), torch::nn::BatchNorm1d(4));
    net->to(torch::kFloat64);
    return net.ptr();
  };
  std::mutex mutex;
  std::vector<torch::Tensor> means;
  run_ranks(3, [&](World& world) {
    const auto strategy = make_strategy(world, task, dist("dist_sync"));
    const World share = strategy->ranks(world).data;
    for (int step = 0; step < 3; ++step) {
      strategy->forward_backward(part_of(batch_of(step), *strategy, share));
      strategy->update();
    }
    const torch::Tensor before = named_buffers(strategy->model())[0].tensor.clone();
    strategy->synchronise();
    const auto buffers = named_buffers(strategy->model());
    EXPECT_EQ(buffers[2].tensor.item<int64_t>(), 3);
    EXPECT_TRUE(world.rank() == 0 || torch::equal(buffers[0].tensor, before));
    const std::lock_guard lock(mutex);
    means.push_back(buffers[0].tensor.clone());
  });
  EXPECT_GT(means[0].abs().sum().item<double>(), 0);
  for (const torch::Tensor& mean : means) EXPECT_TRUE(torch::equal(mean, means[0]));
}

// ---- dist_async and dist_bounded

TEST(DistAsync, with_one_worker_trains_as_one_device_does) {
  for (const int servers : {1, 2})
    expect_same_course(train(1, dist("dist_async", servers)).course, on_one_device(small_task(), dist("dist_sync")));
}

// Holds the first worker up in its second step, for so many steps of the second worker; both begin them together.
Step held_first_worker(int servers, int steps) {
  const auto held = std::make_shared<std::atomic<bool>>(false), done = std::make_shared<std::atomic<bool>>(false);
  return [=](const World& world, Strategy&, int step) {
    const int worker = world.rank() - servers;
    const auto wait_for = [](const std::atomic<bool>& flag) {
      while (!flag) std::this_thread::yield();
    };
    if (worker == 1 && step == 1) wait_for(*held);
    if (worker == 1 && step == 1 + steps) *done = true;
    if (worker != 0 || step != 1) return;
    *held = true;
    wait_for(*done);
  };
}

TEST(DistAsync, takes_b_examples_per_update_and_reports_the_delay) {
  const Trained trained = train(3, dist("dist_async"), small_task(), 40, 12, held_first_worker(1, 2));
  EXPECT_EQ(trained.report.at("examples_per_update"), 4);
  EXPECT_EQ(trained.report.at("examples_per_device"), 4);
  EXPECT_EQ(trained.report.at("updates"), 3 * 40);
  EXPECT_GE(trained.report.at("max_delay"), 2);
  double gradients = 0;
  for (const auto& [name, value] : trained.report)
    if (name.starts_with("delay_")) gradients += value;
  EXPECT_EQ(gradients, 3 * 40);
  EXPECT_TRUE(contains(trained.table, "dist_async"));
  EXPECT_TRUE(contains(trained.table, "gradients by delay"));
}

// A worker that is slower than the others: without a bound the others leave it behind.
Step slow_first_worker(int servers) {
  return [servers](const World& world, Strategy&, int) {
    if (world.rank() == servers) std::this_thread::sleep_for(std::chrono::milliseconds(4));
  };
}

class DistBoundedBy : public ::testing::TestWithParam<std::tuple<int, int>> {};
INSTANTIATE_TEST_SUITE_P(Bounds, DistBoundedBy, ::testing::Combine(::testing::Values(1, 2), ::testing::Values(0, 1, 3)),
                         [](const auto& test) {
                           return lockstep::concat(std::get<0>(test.param), "_servers_", std::get<1>(test.param),
                                                   "_updates");
                         });

TEST_P(DistBoundedBy, applies_no_gradient_older_than_the_bound_when_a_worker_is_slow) {
  const auto [servers, bound] = GetParam();
  StrategyOptions options = dist("dist_bounded", servers);
  options.kvstore.staleness = bound;
  std::mutex mutex;
  double oldest = 0;  // on any server
  run_ranks(servers + 3, [&, servers = servers](World& world) {
    const auto strategy = make_strategy(world, small_task(), options);
    const World share = strategy->ranks(world).data;
    for (int step = 0; step < 30; ++step) {
      slow_first_worker(servers)(world, *strategy, step);
      strategy->forward_backward(part_of(batch_of(step), *strategy, share));
      strategy->update();
    }
    if (strategy->ranks(world).has_data) return;
    const Report report = strategy->report();
    const std::map<std::string, double> numbers(report.begin(), report.end());
    EXPECT_EQ(numbers.at("updates"), 90);
    const std::lock_guard lock(mutex);
    oldest = std::max(oldest, numbers.at("max_delay"));
  });
  EXPECT_LE(oldest, bound);
}

TEST_P(DistBoundedBy, lets_every_worker_finish) {
  const auto [servers, bound] = GetParam();
  StrategyOptions options = dist("dist_bounded", servers);
  options.kvstore.staleness = bound;
  constexpr int kSteps = 30;
  std::mutex mutex;
  std::array<int, 2> done{};
  std::vector<size_t> turns;  // while both are there
  run_ranks(servers + 2, [&, servers = servers](World& world) {
    const auto strategy = make_strategy(world, small_task(), options);
    const World share = strategy->ranks(world).data;
    for (int step = 0; step < kSteps; ++step) {
      strategy->forward_backward(part_of(batch_of(step), *strategy, share));
      strategy->update();
      if (!strategy->ranks(world).has_data) continue;
      const std::lock_guard lock(mutex);
      const size_t worker = world.rank() - servers;
      ++done[worker];
      if (done[0] > 0 && done[1] > 0 && done[1 - worker] < kSteps) turns.push_back(worker);
    }
  });
  // With one server a worker may be paused before it asks to read, and miss a turn.
  for (size_t i = 2; bound == 0 && servers > 1 && i < turns.size(); ++i)
    EXPECT_FALSE(turns[i] == turns[i - 1] && turns[i] == turns[i - 2]) << "three turns of worker " << turns[i];
  EXPECT_EQ(done[0], kSteps);
  EXPECT_EQ(done[1], kSteps);
}

// The first server asks the others nothing between two checkpoints, but is not taken for lost.
TEST(DistAsync, with_several_servers_trains_for_longer_than_the_timeout) {
  StrategyOptions options = dist("dist_async", 2);
  options.timeout = std::chrono::milliseconds(1000 * LOCKSTEP_TEST_PATIENCE);
  std::atomic<bool> enough{false};
  run_ranks(3, [&](World& world) {
    const auto strategy = make_strategy(world, small_task(), options);
    const World share = strategy->ranks(world).data;
    const Stopwatch watch;
    int64_t steps = 0;
    for (; strategy->ranks(world).has_data ? !enough : steps < 1; ++steps) {
      strategy->forward_backward(part_of(batch_of(0), *strategy, share));
      strategy->update();
      if (watch.seconds() > 1.5 * std::chrono::duration<double>(options.timeout).count()) enough = true;
    }
    EXPECT_GE(steps, 1);
  });
  EXPECT_TRUE(enough);
}

TEST(DistAsync, has_no_bound_for_the_delay_of_a_slow_worker) {
  const Trained trained = train(3, dist("dist_async"), small_task(), 30, kBatch, held_first_worker(1, 20));
  EXPECT_GE(trained.report.at("max_delay"), 20);
}

// With a parameter of no dimension, and a layer that no sample goes through.
struct OddNetImpl : torch::nn::Module {
  OddNetImpl() {
    layer = register_module("layer", torch::nn::Linear(6, 4));
    temperature = register_parameter("temperature", torch::full({}, 0.5));
    unused = register_module("unused", torch::nn::Linear(6, 4));
    to(torch::kFloat64);
  }
  torch::Tensor forward(const torch::Tensor& data) { return layer(data) * temperature; }
  torch::nn::Linear layer{nullptr}, unused{nullptr};
  torch::Tensor temperature;
};
TORCH_MODULE(OddNet);

Task odd_task() {
  Task task = small_task();
  task.make_model = [] { return OddNet().ptr(); };
  task.forward = [](torch::nn::Module& model, const torch::Tensor& data) {
    return dynamic_cast<OddNetImpl&>(model).forward(data);
  };
  return task;
}

TEST(DistSync, does_not_update_a_parameter_without_a_gradient) {
  for (const bool update_on_kvstore : {true, false}) {
    StrategyOptions options = dist("dist_sync", 2);
    options.kvstore.update_on_kvstore = update_on_kvstore;
    std::get<SGDOptions>(options.optimizer).weight_decay = 0.1;
    const Course expected = on_one_device(odd_task(), options);
    expect_same_course({train(2, options, odd_task()).course.parameters, {}}, {expected.parameters, {}});
  }
}

// ---- Checkpoints

class ResumedWithServers : public ::testing::TestWithParam<std::tuple<int, bool>> {};
INSTANTIATE_TEST_SUITE_P(Servers, ResumedWithServers, ::testing::Combine(::testing::Values(1, 2), ::testing::Bool()));

// The checkpoint of the first server holds the weights and states of all servers.
TEST_P(ResumedWithServers, trains_on_with_the_same_bits) {
  const auto [servers, update_on_kvstore] = GetParam();
  StrategyOptions options = dist("dist_sync", servers);
  options.kvstore.update_on_kvstore = update_on_kvstore;
  const Course whole = train(2, options, odd_task()).course;
  std::vector<torch::Tensor> parameters;
  std::vector<Optimizer::StateTensors> states;
  const auto run = [&](int from, int to, Course* result) {
    run_ranks(servers + 2, [&, servers = servers](World& world) {
      const auto strategy = make_strategy(world, odd_task(), options);
      const World share = strategy->ranks(world).data;
      if (from > 0) {
        const torch::NoGradGuard no_grad;
        const auto into = strategy->model().parameters();
        for (size_t i = 0; i < into.size(); ++i) {
          torch::Tensor(into[i]).copy_(parameters[i]);
          strategy->optimizer().set_state(into[i], states[i]);
        }
        strategy->restored(from);
      }
      for (int step = from; step < to; ++step) {
        strategy->forward_backward(part_of(batch_of(step), *strategy, share));
        strategy->update();
      }
      strategy->synchronise();
      if (world.rank() > 0) return;
      if (result != nullptr) *result = {values_of(strategy->model()), {}};
      parameters = values_of(strategy->model());
      states.clear();
      for (const torch::Tensor& parameter : strategy->model().parameters()) {
        states.push_back(strategy->optimizer().state_of(parameter));
        if (!states.back().empty()) {
          EXPECT_EQ(states.back().at("step").item<float>(), static_cast<float>(to));
        }
        for (auto& [name, tensor] : states.back()) tensor = tensor.clone();
      }
    });
  };
  Course resumed;
  run(0, 9, nullptr);
  run(9, kSteps, &resumed);
  expect_same_bits({resumed.parameters, {}}, {whole.parameters, {}});
}

TEST(KVStoreStrategy, refuses_what_its_servers_cannot_do) {
  const auto refusal = [](const StrategyOptions& options, int workers) {
    return message_of<UsageError>([&] {
      run_ranks(options.kvstore.servers + workers, [&](World& world) { make_strategy(world, small_task(), options); });
    });
  };
  StrategyOptions clipped = dist("dist_sync", 2);
  clipped.clipping.max_norm = 1;
  EXPECT_TRUE(contains(refusal(clipped, 1), "--clip-norm where several servers update"));
  EXPECT_TRUE(contains(refusal(dist("dist_sync", 2), 0), "2 servers and 0 workers"));
}

}  // namespace
}  // namespace lockstep
