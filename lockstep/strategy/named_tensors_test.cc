// SPDX-License-Identifier: Apache-2.0
// Batches with more than data and target: every strategy brings all of it to forward and loss.
#include <atomic>
#include <mutex>

#include "lockstep/data_parallel.h"
#include "lockstep/strategy/devices/replica.h"
#include "lockstep/sync_batch_norm.h"
#include "tests/strategies.h"
#include "tests/support.h"

namespace lockstep {
namespace {

using namespace testing;

constexpr int kStepsWithMasks = 6;

struct MaskedCase {
  std::string name;
  int ranks;
  StrategyOptions options;
};

using GlobalBatch = Batch (*)(int step);

// The losses of all steps, then the outputs for another batch.
torch::Tensor losses_and_outputs(const Task& task, GlobalBatch global_batch, int ranks, StrategyOptions options) {
  options.optimizer = SGDOptions{.lr = 0.1};
  options.seed = 4;
  torch::Tensor found;
  std::mutex mutex;
  run_ranks(ranks, [&](World& world) {
    StrategyOptions mine = options;
    if (strategy_info(options.kind).threads && ranks == 1) mine.places = test_places(options.devices);
    const auto strategy = make_strategy(world, task, mine);
    const World share = strategy->ranks(world).data;
    std::vector<double> losses;
    for (int step = 0; step < kStepsWithMasks; ++step) {
      const Batch batch = global_batch(step);
      const BatchTotals totals = strategy->forward_backward(part_of(batch, *strategy, share));
      EXPECT_EQ(totals.samples, task.samples ? task.samples(batch) : kBatch);
      EXPECT_EQ(totals.examples, kBatch);
      losses.push_back(totals.mean_loss);
      strategy->update();
    }
    strategy->synchronise();
    const torch::NoGradGuard no_grad;
    const torch::Tensor output = strategy->forward(global_batch(kStepsWithMasks));
    {
      const std::lock_guard lock(mutex);
      if (output.defined()) found = torch::cat({torch::tensor(losses, torch::kFloat64), output.flatten().cpu()});
    }
    world.barrier();
  });
  return found;
}

class NamedTensorsIn : public ::testing::TestWithParam<MaskedCase> {};
INSTANTIATE_TEST_SUITE_P(
    Strategies, NamedTensorsIn,
    ::testing::Values(
        MaskedCase{"single_in_parts", 1, {.kind = StrategyKind::kSingle, .accumulate = 4}},
        MaskedCase{"ddp", 3, {.kind = StrategyKind::kDdp}},
        MaskedCase{"ddp_in_parts", 2, {.kind = StrategyKind::kDdp, .accumulate = 3}},
        MaskedCase{"ddp_through_buckets",
                   3,
                   {.kind = StrategyKind::kDdp, .accumulate = 2, .ddp = {.share_parameters = false}}},
        MaskedCase{"ddp_in_shards", 2, {.kind = StrategyKind::kDdp, .ddp = {.virtual_shards = 4}}},
        MaskedCase{"recomputed", 1, {.kind = StrategyKind::kSingle, .checkpoint_activations = true}},
        MaskedCase{"towers", 1, {.kind = StrategyKind::kTowers, .devices = 3}},
        MaskedCase{"towers_in_parts", 1, {.kind = StrategyKind::kTowers, .accumulate = 2, .devices = 3}},
        MaskedCase{"data_parallel", 1, {.kind = StrategyKind::kDataParallel, .devices = 3}},
        MaskedCase{"kvstore", 1, {.kind = StrategyKind::kKVStore, .devices = 3}},
        MaskedCase{
            "kvstore_with_a_server", 3, {.kind = StrategyKind::kKVStore, .kvstore = {.kind = KVStoreKind::kDistSync}}},
        MaskedCase{"averaging", 2, {.kind = StrategyKind::kAveraging, .accumulate = 2, .devices = 2}},
        MaskedCase{"pipeline", 1, {.kind = StrategyKind::kPipeline, .devices = 3}},
        MaskedCase{
            "pipeline_of_replicas", 1, {.kind = StrategyKind::kPipeline, .devices = 4, .pipeline = {.stages = "2"}}},
        MaskedCase{"pipeline_of_ranks", 4, {.kind = StrategyKind::kPipeline, .pipeline = {.stages = "0-1,2-7"}}}),
    [](const auto& test) { return test.param.name; });

TEST_P(NamedTensorsIn, train_as_on_one_device) {
  const auto& [name, ranks, options] = GetParam();
  const torch::Tensor one = losses_and_outputs(weighted_task(), weighted_batch, 1, {.kind = StrategyKind::kSingle});
  const torch::Tensor many = losses_and_outputs(weighted_task(), weighted_batch, ranks, options);
  EXPECT_TRUE(torch::allclose(many, one, 1e-9, 1e-9));
}

TEST_P(NamedTensorsIn, weigh_by_what_the_task_counts) {
  const auto& [name, ranks, options] = GetParam();
  const torch::Tensor one = losses_and_outputs(counted_task(), counted_batch, 1, {.kind = StrategyKind::kSingle});
  const torch::Tensor many = losses_and_outputs(counted_task(), counted_batch, ranks, options);
  EXPECT_TRUE(torch::allclose(many, one, 1e-9, 1e-9)) << many << one;
}

TEST(NamedTensors, that_count_nothing_delay_no_other_worker) {
  const StrategyOptions options{.kind = StrategyKind::kKVStore,
                                .timeout = std::chrono::seconds(20),
                                .kvstore = {.kind = KVStoreKind::kDistBounded, .staleness = 0}};
  run_ranks(3, [&](World& world) {
    const auto strategy = make_strategy(world, counted_task(), options);
    const World share = strategy->ranks(world).data;
    for (int step = 0; step < kStepsWithMasks; ++step) {  // one of the two workers has nothing
      strategy->forward_backward(part_of(counted_batch(step), *strategy, share));
      strategy->update();
    }
    strategy->synchronise();
  });
}

TEST(NamedTensors, are_counted_once_for_each_part) {
  Task task = counted_task();
  const auto counted = std::make_shared<std::atomic<int>>(0);
  task.samples = [counted, count = task.samples](const Batch& batch) {
    ++*counted;
    return count(batch);
  };
  const auto counts = [&](const StrategyOptions& options) {
    const auto strategy = make_strategy(World::single(), task, options);
    *counted = 0;
    strategy->forward_backward(counted_batch(0));
    return counted->load();
  };
  EXPECT_EQ(counts({.kind = StrategyKind::kPipeline,
                    .devices = 4,
                    .places = test_places(4),
                    .pipeline = {.stages = "2", .micro_batches = 3}}),
            2 * 3);
  EXPECT_EQ(counts({.kind = StrategyKind::kSingle, .accumulate = 4}), 4);
  EXPECT_EQ(counts({.kind = StrategyKind::kAveraging, .accumulate = 2, .devices = 3, .places = test_places(3)}), 2 * 3);
}

TEST(NamedTensors, are_exchanged_by_a_part_that_counts) {
  Task task = counted_task();
  int64_t last = 0;
  task.samples = [&last, count = task.samples](const Batch& batch) { return last = count(batch); };
  const auto strategy = make_strategy(World::single(), task, {.kind = StrategyKind::kSingle, .accumulate = 4});
  strategy->forward_backward(counted_batch(0));  // two of the four parts count
  EXPECT_GT(last, 0);
}

TEST(NamedTensors, are_not_counted_below_zero) {
  Task task = counted_task();
  task.samples = [](const Batch&) { return -1; };
  const auto strategy = make_strategy(World::single(), task, {.kind = StrategyKind::kSingle});
  EXPECT_TRUE(contains(message_of<UsageError>([&] { strategy->forward_backward(counted_batch(0)); }),
                       "Task::samples of small counts -1 in a batch of 10"));
}

TEST(NamedTensors, reach_the_replicas_of_a_data_parallel_module) {
  Devices devices({.count = 3, .places = test_places(3)});
  DataParallel net(weighted_task(), devices);
  const Task task = weighted_task();
  const Batch batch = weighted_batch(0);
  const torch::Tensor expected = task.forward(net.module(), batch.to(devices.where(0)));
  EXPECT_TRUE(torch::allclose(net.forward(batch), expected, 1e-12, 1e-12));
}

TEST(NamedTensors, are_not_left_out_where_a_sequential_is_cut) {
  Task task = weighted_task();
  task.stages = nullptr;
  const StrategyOptions options{.kind = StrategyKind::kPipeline, .devices = 2};
  EXPECT_TRUE(contains(message_of<UsageError>([&] { make_strategy(World::single(), task, options); }),
                       "Task::forward takes the batch"));
}

TEST(NamedTensors, are_cut_with_their_samples) {
  const Batch batch = weighted_batch(0);
  const std::vector<Batch> parts = parts_of(batch, 4);
  for (const auto& [name, tensor] : batch.more) {
    std::vector<torch::Tensor> pieces;
    for (const Batch& part : parts) pieces.push_back(part[name]);
    EXPECT_EQ(pieces[0].size(0), parts[0].size());
    EXPECT_TRUE(torch::equal(torch::cat(pieces), tensor)) << name;
  }
  Batch of_classes = batch;
  of_classes.more["share"] = torch::ones({4});
  EXPECT_TRUE(contains(message_of<DataError>([&] { part_of(of_classes, 0, 2); }),
                       "share has shape [4] in a batch of 10 samples"));
}

TEST(NamedTensors, are_named_where_a_function_misses_one) {
  const std::string message = message_of<UsageError>([] { weighted_batch(0)["mask"]; });
  EXPECT_TRUE(contains(message, "no tensor mask; it has: keep, weight")) << message;
  const ModulePtr model = weighted_task().make_model();
  EXPECT_TRUE(contains(message_of<UsageError>([&] { weighted_task().forward(*model, batch_of(0).data); }),
                       "no tensor keep; it has: none"));
}

TEST(NamedTensors, are_not_counted_where_normalisation_counts_rows) {
  run_ranks(2, [](World& world) {
    const SyncBatchNorm norm(world, SyncBatchNormOptions{.features = 6});
    Task task = counted_task();
    task.make_model = [norm] { return torch::nn::Sequential(norm).ptr(); };
    EXPECT_TRUE(contains(message_of<UsageError>([&] { make_strategy(world, task, {}); }),
                         "Task::samples of small, whose model has a SyncBatchNorm"));
    world.barrier();
  });
}

}  // namespace
}  // namespace lockstep
