// SPDX-License-Identifier: Apache-2.0
// Each wait between streams in a training step, left out one at a time: the happens-before check reports it. A wait that can
// be left out unnoticed has no place in the product.
#include <gtest/gtest.h>

#include <barrier>
#include <cmath>
#include <set>

#include "lockstep/data/loader/device_copy.h"
#include "tests/simulated_cuda/gpu_strategies.h"

namespace lockstep {
namespace {

using namespace testing;

// The next step is one without a fault.
void end_leaving_out() {
  simulated_cuda_leave_out("", 0, 0);
  for (int i = 0; i < kGpuCount; ++i) gpus().synchronizeDevice(gpu(i).index());
  simulated_cuda_clear_races();
}

struct Outcome {
  int waits = 0;      // of the kind, on the device
  bool seen = false;  // a race was reported
};

Outcome without(const char* kind, int device, int number, const std::function<void()>& step) {
  simulated_cuda_leave_out(kind, device, number);
  step();
  const Outcome outcome{simulated_cuda_waits(), simulated_cuda_races() > 0};
  end_leaving_out();
  return outcome;
}

// Whether leaving out this wait is reported. Which device's thread comes first differs from step to step, and in some orders
// another wait does the same.
bool is_seen(const char* kind, int device, int number, const std::function<void()>& step) {
  for (int attempt = 0; attempt < 10; ++attempt)
    if (without(kind, device, number, step).seen) return true;
  return false;
}

// Leaves out every wait of the kind in a step, one at a time. Returns how many there are.
int expect_seen(const char* kind, int devices, const std::function<void()>& step) {
  int all = 0;
  for (int device = 0; device < devices; ++device) {
    const int waits = without(kind, device, 0, step).waits;
    for (int number = 1; number <= waits; ++number)
      EXPECT_TRUE(is_seen(kind, device, number, step))
          << kind << ' ' << number << " of " << waits << " on cuda:" << device << " may be left out";
    all += waits;
  }
  return all;
}

class LeftOutWaits : public ::testing::TestWithParam<GpuArrangement> {
 protected:
  static constexpr int kDevices = 3;

  void TearDown() override { let_all_reach_each_other(true); }

  static void let_all_reach_each_other(bool allowed) {
    for (int i = 0; i < kGpuCount; ++i)
      for (int j = 0; j < kGpuCount; ++j)
        if (i != j) simulated_cuda_peer_access(i, j, allowed ? 1 : 0);
  }

  int expect_all_seen() const {
    const auto strategy = strategy_on_gpus(GetParam().options, kDevices);
    train_step(*strategy);
    return expect_seen("event", kDevices, [&] { train_step(*strategy); });
  }
};
INSTANTIATE_TEST_SUITE_P(Strategies, LeftOutWaits, ::testing::ValuesIn(arrangements_in_one_process()),
                         [](const auto& test) { return test.param.name; });

// One for each part of the batch; in a pipeline for the data and for the targets.
TEST_P(LeftOutWaits, for_events_are_seen) {
  EXPECT_EQ(expect_all_seen(), GetParam().name == "pipeline" ? 2 : kDevices);
}

// And one for each copy that goes through the host.
TEST_P(LeftOutWaits, for_events_without_peer_access_are_seen) {
  let_all_reach_each_other(false);
  const bool copies_between_gpus = !GetParam().name.ends_with("cpu");
  EXPECT_EQ(expect_all_seen() > kDevices, copies_between_gpus);
}

// Of the waits at the end of each job of the devices those are needed for the order that come after a copy to the host. All of them
// are there for the times of the phases, and to name a GPU that hangs.
TEST_P(LeftOutWaits, of_the_host_are_seen_after_copies_to_it) {
  const bool over_host = GetParam().name.ends_with("cpu");
  int seen = 0;
  for (int number = 1, waits = 1; number <= waits; ++number) {
    const auto strategy = strategy_on_gpus(GetParam().options, kDevices);
    train_step(*strategy);
    double loss = 0;
    const auto steps = [&] {
      train_step(*strategy);
      loss = train_step(*strategy);
    };
    if (number == 1) waits = without("host", 1, 0, steps).waits;
    const Outcome outcome = without("host", 1, number, steps);
    if (outcome.seen || !std::isfinite(loss)) ++seen;  // what has not arrived is NaN
  }
  EXPECT_EQ(seen, over_host ? 1 : 0);
}

// A loop of one's own, which may drop a batch while the GPU still works on it.
TEST(LeftOutWaitsOfTheLoader, are_seen) {
  const Batch pinned{even_batch().data.pin_memory(), even_batch().target.pin_memory()};
  const auto stream = copy_stream(gpu(0));
  const auto step = [&] {
    Batch batch = receive(start_copy(pinned, stream));
    (void)batch.data.sum();
    (void)batch.target.sum();
    batch = {};
    (void)start_copy(pinned, stream);  // the next batch may get the memory of this one
  };
  EXPECT_EQ(expect_seen("event", 1, step), 1);
  EXPECT_EQ(expect_seen("record_stream", 1, step), 2);
}

struct LeftOut {
  const char* kind;
  int rank = 0;
  std::set<int>
      covered{};  // numbers of waits that an earlier one covers, as NCCL works in order: leaving them out harms nobody
};

// Both ranks make a step with one wait of a rank left out.
Outcome without(const LeftOut& wait, int number, const World& world, std::barrier<>& both,
                const std::function<void()>& step) {
  Outcome outcome;
  if (world.rank() == 0) simulated_cuda_leave_out(wait.kind, wait.rank, number);
  both.arrive_and_wait();
  step();
  both.arrive_and_wait();
  outcome = {simulated_cuda_waits(), simulated_cuda_races() > 0};
  both.arrive_and_wait();
  if (world.rank() == 0) end_leaving_out();
  both.arrive_and_wait();
  return outcome;
}

int expect_seen_between_ranks(const LeftOut& wait, const StrategyOptions& options) {
  std::barrier<> both(2);
  int waits = 0;
  run_ranks_on_gpus(2, [&](World& world) {
    const auto strategy = make_strategy(world, even_task(), options);
    const Batch all = even_batch();
    const Batch mine = options.kind == StrategyKind::kPipeline ? all : part_of(all, world);
    const Batch batch{mine.data.to(world.device()), mine.target.to(world.device())};
    const auto step = [&] {  // the next forward finds what was not waited for in the update
      strategy->update();
      strategy->forward_backward(batch);
    };
    strategy->forward_backward(batch);
    step();
    step();  // the buckets of ddp are those of later steps now
    const int count = without(wait, 0, world, both, step).waits;
    for (int number = 1; number <= count; ++number)
      EXPECT_EQ(without(wait, number, world, both, step).seen, !wait.covered.contains(number))
          << wait.kind << ' ' << number << " of " << count << " of rank " << wait.rank;
    if (world.rank() == 0) waits = count;
  });
  return waits;
}

// A sum of samples and losses, and a bucket: its gradients, with which comes who has one, and its parameters.
TEST(LeftOutWaitsBetweenRanks, are_seen_in_ddp) {
  const StrategyOptions options{.optimizer = SGDOptions{.lr = 0.1}, .seed = 4};
  EXPECT_EQ(expect_seen_between_ranks({"allreduce"}, options), 1);
  EXPECT_EQ(expect_seen_between_ranks({"reduce_scatter"}, options), 1);
  EXPECT_EQ(expect_seen_between_ranks({"allgather"}, options), 1);
}

// The bucket goes as a whole.
TEST(LeftOutWaitsBetweenRanks, are_seen_in_ddp_with_separate_parameters) {
  EXPECT_EQ(expect_seen_between_ranks(
                {"allreduce"}, {.optimizer = SGDOptions{.lr = 0.1}, .seed = 4, .ddp = {.share_parameters = false}}),
            2);
}

// Beside those of ddp, one for the norm that all slices have together.
TEST(LeftOutWaitsBetweenRanks, are_seen_in_ddp_with_clipping) {
  const StrategyOptions options{.optimizer = SGDOptions{.lr = 0.1}, .clipping = {.max_norm = 0.01}, .seed = 4};
  EXPECT_EQ(expect_seen_between_ranks({"allreduce"}, options), 2);
}

// Every shard's gradients go to the rank that updates their slice. With several shards in a rank the wait for the last one's
// covers the others: NCCL works in order.
TEST(LeftOutWaitsBetweenRanks, are_seen_in_ddp_with_virtual_shards) {
  const StrategyOptions options{.optimizer = SGDOptions{.lr = 0.1}, .seed = 4, .ddp = {.virtual_shards = 2}};
  EXPECT_EQ(expect_seen_between_ranks({"alltoall"}, options), 1);
  // The flags of gradients, the sums of samples, and the losses, whose wait covers the one before.
  EXPECT_EQ(expect_seen_between_ranks({.kind = "allreduce", .covered = {3}}, options), 3);
  EXPECT_EQ(expect_seen_between_ranks({"allgather"}, options), 1);
}

// The first stage waits for the gradient of each micro-batch, the last one for what it computes with.
TEST(LeftOutWaitsBetweenRanks, are_seen_in_a_pipeline) {
  const StrategyOptions options{.kind = StrategyKind::kPipeline,
                                .optimizer = SGDOptions{.lr = 0.1},
                                .seed = 4,
                                .pipeline = {.stages = "0-1,2-2", .micro_batches = 3}};
  EXPECT_EQ(expect_seen_between_ranks({"recv", 0}, options), 3);
  EXPECT_EQ(expect_seen_between_ranks({"recv", 1}, options), 3);
}

}  // namespace
}  // namespace lockstep
