// SPDX-License-Identifier: Apache-2.0
// ddp with a rank for each GPU, where each rank updates a slice of the parameters: the same training, less memory, and an error
// for what a slice can't do.
#include <gtest/gtest.h>

#include <barrier>
#include <functional>
#include <limits>
#include <mutex>
#include <thread>

#include "lockstep/base/text.h"
#include "lockstep/ddp.h"
#include "lockstep/model/parameters.h"
#include "lockstep/strategy/devices/replica.h"
#include "tests/simulated_cuda/gpu_strategies.h"
#include "tests/support.h"

namespace lockstep {
namespace {

using namespace testing;

constexpr double kScale = 8;

StrategyOptions ddp_with(const OptimizerOptions& optimizer) {
  return {.optimizer = optimizer, .clipping = {.max_norm = 0.5, .max_value = 0.2}, .ema_decay = 0.9, .seed = 4};
}

Batch on_gpu_of(const World& world, const Batch& batch) {
  const Batch mine = part_of(batch, world);
  return {mine.data.to(world.device()), mine.target.to(world.device())};
}

using States = std::vector<Optimizer::StateTensors>;

States states_of(Strategy& strategy) {
  States states;
  for (const auto& [name, parameter] : named_parameters(strategy.model())) {
    states.push_back(strategy.optimizer().state_of(parameter));
    for (auto& [key, tensor] : states.back()) tensor = tensor.detach().cpu().clone();
  }
  return states;
}

void expect_same_states(const States& one, const States& other) {
  ASSERT_EQ(one.size(), other.size());
  for (size_t i = 0; i < one.size(); ++i) {
    ASSERT_EQ(one[i].size(), other[i].size());
    for (const auto& [key, tensor] : one[i])
      EXPECT_TRUE(torch::allclose(tensor, other[i].at(key), 1e-9, 1e-9)) << key << " of parameter " << i;
  }
}

struct Trained {
  Course course;
  States states;  // as every rank has them
};

// Steps [from, to) on a GPU for each rank, or on a core. begin: states and parameters to go on from.
Trained train(int ranks, const StrategyOptions& options, int from, int to, const Trained& begin = {}) {
  Trained trained;
  std::mutex mutex;
  const auto body = [&](World& world) {
    const auto strategy = make_strategy(world, small_task(), options);
    strategy->optimizer().set_loss_scale(kScale);
    const auto parameters = named_parameters(strategy->model());
    for (size_t i = 0; i < begin.states.size(); ++i) {
      const torch::NoGradGuard no_grad;
      torch::Tensor(parameters[i].tensor).copy_(begin.course.parameters[i]);
      strategy->optimizer().set_state(parameters[i].tensor, begin.states[i]);
    }
    strategy->restored(from);
    std::vector<double> losses;
    for (int step = from; step < to; ++step) losses.push_back(train_step(*strategy, on_gpu_of(world, batch_of(step))));
    const Trained mine{{values_of(strategy->model()), losses}, states_of(*strategy)};
    const std::lock_guard lock(mutex);
    if (!trained.states.empty()) {
      expect_same_bits(mine.course, trained.course);
      expect_same_states(mine.states, trained.states);
    }
    trained = mine;
  };
  ranks == 1 ? run_ranks(1, body) : run_ranks_on_gpus(ranks, body);
  return trained;
}

class SlicedUpdate : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, SlicedUpdate, ::testing::Values(2, 3, 4));

// Parameters whose sizes nothing divides; with clipping, a loss scale and an average.
TEST_P(SlicedUpdate, trains_as_one_rank_does) {
  for (const OptimizerOptions& optimizer :
       {OptimizerOptions(SGDOptions{.lr = 0.1, .momentum = 0.9, .nesterov = true, .weight_decay = 0.01}),
        OptimizerOptions(AdamOptions{.lr = 0.01}), OptimizerOptions(AdamWOptions{.lr = 0.01})}) {
    const Trained one = train(1, ddp_with(optimizer), 0, kSteps);
    const Trained sliced = train(GetParam(), ddp_with(optimizer), 0, kSteps);
    expect_same_course(sliced.course, one.course);
    expect_same_states(sliced.states, one.states);
  }
}

TEST_P(SlicedUpdate, goes_on_with_the_state_of_another_number_of_ranks) {
  const StrategyOptions options = ddp_with(AdamWOptions{.lr = 0.01});
  const Trained half = train(4, options, 0, 5);
  Trained whole = train(GetParam(), options, 5, 10, half);
  const Trained one = train(1, options, 0, 10);
  whole.course.losses.insert(whole.course.losses.begin(), half.course.losses.begin(), half.course.losses.end());
  expect_same_course(whole.course, one.course);
  expect_same_states(whole.states, one.states);
}

// LAMB and LARS need norms over whole parameters: every rank updates them all.
TEST_P(SlicedUpdate, is_left_to_every_rank_with_a_layerwise_rule) {
  for (const OptimizerOptions& optimizer :
       {OptimizerOptions(LAMBOptions{.lr = 0.01}), OptimizerOptions(LARSOptions{.lr = 0.1})})
    expect_same_course(train(GetParam(), ddp_with(optimizer), 0, kSteps).course,
                       train(1, ddp_with(optimizer), 0, kSteps).course);
}

TEST_P(SlicedUpdate, is_skipped_by_all_ranks_when_one_has_an_overflow) {
  run_ranks_on_gpus(GetParam(), [](World& world) {
    const auto strategy = make_strategy(world, small_task(), ddp_with(SGDOptions{.lr = 0.1}));
    strategy->optimizer().set_loss_scale(kScale);
    train_step(*strategy, on_gpu_of(world, batch_of(0)));
    const auto before = values_of(strategy->model());
    Batch batch = on_gpu_of(world, batch_of(1));
    if (world.rank() == 1) batch.data.mul_(std::numeric_limits<double>::infinity());
    train_step(*strategy, batch);
    EXPECT_TRUE(strategy->optimizer().skipped());
    expect_same_bits({values_of(strategy->model()), {}}, {before, {}});
  });
}

// Two moments and an average: a slice of the three.
TEST_P(SlicedUpdate, has_the_optimizers_state_of_its_slice_only) {
  run_ranks_on_gpus(GetParam(), [](World& world) {
    const Replica replica = make_replica(even_task(), ddp_with(AdamWOptions{}), world.device());
    const auto before = static_cast<int64_t>(counted(world.rank()).allocated);
    const DistributedDataParallel ddp(world, *replica.model, *replica.optimizer, {.slice_update = true});
    const auto more = [&] { return static_cast<int64_t>(counted(world.rank()).allocated) - before; };
    const int64_t bucket = kModelBytes, slices = 4 * kModelBytes / world.size();  // the mean and the state
    constexpr int64_t kRounding = 16 * 512;                                       // of 16 tensors
    // NCCL's thread lets go a little later of what it has sent.
    const Deadline deadline = Deadline::after(std::chrono::seconds(10));
    while (more() > bucket + slices + kRounding && !deadline.passed()) std::this_thread::yield();
    EXPECT_NEAR(more(), bucket + slices, kRounding) << "bytes on " << world.describe();
  });
}

// ---- Virtual shards

// Of batches whose shards differ in size.
Course course_of_shards(int ranks, const StrategyOptions& options) {
  Course course;
  std::mutex mutex;
  run_ranks_on_gpus(ranks, [&](World& world) {
    const auto strategy = make_strategy(world, small_task(), options);
    std::vector<double> losses;
    for (int step = 0; step < kSteps; ++step)
      losses.push_back(train_step(*strategy, on_gpu_of(world, batch_of(step, 5 + step))));
    const std::lock_guard lock(mutex);
    if (world.rank() == 0) course = {values_of(strategy->model()), losses};
  });
  return course;
}

TEST(VirtualShardsOnGpus, give_the_same_bits_on_any_number_of_gpus) {
  for (const OptimizerOptions& optimizer :
       {OptimizerOptions(SGDOptions{.lr = 0.1, .momentum = 0.9}), OptimizerOptions(AdamWOptions{.lr = 0.01})}) {
    StrategyOptions options = ddp_with(optimizer);
    options.ddp.virtual_shards = 4;
    const Course one = course_of_shards(1, options);
    expect_same_bits(course_of_shards(2, options), one);
    expect_same_bits(course_of_shards(4, options), one);
  }
}

TEST(VirtualShardsOnGpus, train_as_those_on_cores_do) {
  StrategyOptions options = ddp_with(AdamWOptions{.lr = 0.01});
  options.ddp.virtual_shards = 4;
  Course on_cores;
  run_ranks(1, [&](World& world) {
    const auto strategy = make_strategy(world, small_task(), options);
    for (int step = 0; step < kSteps; ++step)
      on_cores.losses.push_back(train_step(*strategy, batch_of(step, 5 + step)));
    on_cores.parameters = values_of(strategy->model());
  });
  expect_same_course(course_of_shards(2, options), on_cores);
}

TEST(VirtualShardsOnGpus, are_refused_with_a_layerwise_rule) {
  StrategyOptions options = ddp_with(LAMBOptions{});
  options.ddp.virtual_shards = 4;
  const World world = World::single({.device = torch::kCUDA});
  const std::string message = message_of<UsageError>([&] { make_strategy(world, small_task(), options); });
  EXPECT_TRUE(contains(message, "other than LAMB and LARS")) << message;
}

// ---- What a slice can't do is an error on all ranks

// Until both ranks are here and their GPUs are done: a rank that fails takes nothing from the other.
using Meet = std::function<void()>;

struct Refusal {
  std::string name;
  std::function<void(DistributedDataParallel&, Optimizer&, torch::nn::Module&, const Batch&, const Meet&)> program;
  std::string text;
};
void PrintTo(const Refusal& refusal, std::ostream* out) { *out << refusal.name; }

torch::Tensor loss_of(torch::nn::Module& model, const Batch& batch) {
  return small_task().loss(small_task().forward(model, batch.data), batch.target);
}

std::vector<Refusal> refusals() {
  return {
      {"a_second_step",
       [](auto& ddp, auto& optimizer, auto& model, const Batch& batch, const Meet& meet) {
         ddp.backward(loss_of(model, batch), batch.size());
         optimizer.step();
         meet();
         optimizer.step();
       },
       "step() without gradients that were exchanged"},
      {"a_gradient_clipped_by_hand",
       [](auto& ddp, auto& optimizer, auto& model, const Batch& batch, const Meet& meet) {
         ddp.backward(loss_of(model, batch), batch.size());
         meet();
         model.parameters()[0].mutable_grad().mul_(0.5);
         optimizer.step();
       },
       "was changed between backward() and step()"},
      {"a_second_backward",
       [](auto& ddp, auto&, auto& model, const Batch& batch, const Meet& meet) {
         ddp.backward(loss_of(model, batch), batch.size());
         meet();
         ddp.backward(loss_of(model, batch), batch.size());
       },
       "that it has not counted"},
      {"a_plain_backward",
       [](auto&, auto&, auto& model, const Batch& batch, const Meet&) { loss_of(model, batch).backward(); },
       "a plain loss.backward()"},
      {"a_step_after_no_sync",
       [](auto& ddp, auto& optimizer, auto& model, const Batch& batch, const Meet&) {
         const auto guard = ddp.no_sync();
         ddp.backward(loss_of(model, batch), batch.size());
         optimizer.step();
       },
       "step() without gradients that were exchanged"},
  };
}

class SlicedUpdateRefuses : public ::testing::TestWithParam<Refusal> {};
INSTANTIATE_TEST_SUITE_P(Programs, SlicedUpdateRefuses, ::testing::ValuesIn(refusals()),
                         [](const auto& test) { return test.param.name; });

TEST_P(SlicedUpdateRefuses, with_an_error) {
  std::barrier<> both(2);
  testing::backend::run_threads(2, [&](int rank, const testing::backend::StorePtr& store) {
    const World world = WorldState::over_store(store, rank, 2, {.device = torch::kCUDA});
    const Replica replica = make_replica(small_task(), ddp_with(SGDOptions{.lr = 0.1}), world.device());
    DistributedDataParallel ddp(world, *replica.model, *replica.optimizer, {.slice_update = true});
    const Batch batch = on_gpu_of(world, batch_of(0));
    const auto meet = [&] {
      gpus().synchronizeDevice(world.device().index());
      both.arrive_and_wait();
    };
    meet();
    const std::string message =
        message_of<UsageError>([&] { GetParam().program(ddp, *replica.optimizer, *replica.model, batch, meet); });
    EXPECT_TRUE(contains(message, GetParam().text)) << message;
  });
}

// Several backward() per step, batches of different sizes.
TEST(SlicedUpdateAfter, no_sync_is_the_mean_over_all_samples) {
  const auto weights_after = [](int ranks, const auto& run) {
    std::vector<torch::Tensor> values;
    std::mutex mutex;
    run(ranks, [&](World& world) {
      const Replica replica = make_replica(small_task(), ddp_with(AdamWOptions{.lr = 0.01}), world.device());
      DistributedDataParallel ddp(world, *replica.model, *replica.optimizer, {.slice_update = true});
      for (int step = 0; step < 3; ++step) {
        replica.optimizer->zero_grad();
        const Batch first = on_gpu_of(world, batch_of(2 * step, 7)), second = on_gpu_of(world, batch_of(2 * step + 1));
        {
          const auto guard = ddp.no_sync();
          ddp.backward(loss_of(*replica.model, first), first.size());
        }
        ddp.backward(loss_of(*replica.model, second), second.size());
        replica.optimizer->step();
      }
      const std::lock_guard lock(mutex);
      values = values_of(*replica.model);
    });
    return values;
  };
  const auto on_cores = [](int ranks, const auto& body) { run_ranks(ranks, body); };
  expect_same_course({weights_after(3, run_ranks_on_gpus), {}}, {weights_after(3, on_cores), {}});
}

}  // namespace
}  // namespace lockstep
