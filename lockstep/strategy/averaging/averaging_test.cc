// SPDX-License-Identifier: Apache-2.0
#include "lockstep/strategy.h"

#include <torch/nn/modules/conv.h>
#include <unistd.h>

#include <fstream>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>

#include "lockstep/base/int_vector.h"
#include "lockstep/sampler.h"
#include "lockstep/strategy/averaging/background_sum.h"
#include "lockstep/strategy/averaging/flat_block.h"
#include "lockstep/strategy/averaging/int8_blocks.h"
#include "lockstep/strategy/devices/replica.h"
#include "tests/strategies.h"
#include "tests/support.h"
#include "tests/worlds.h"

namespace lockstep {
namespace {

using namespace testing;

StrategyOptions averaging(int devices, int64_t every = 1) {
  return {.kind = StrategyKind::kAveraging,
          .optimizer = SGDOptions{.lr = 0.1},
          .seed = 4,
          .devices = devices,
          .averaging = {.every = every}};
}

class AveragingOfSize : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Sizes, AveragingOfSize, ::testing::Values(1, 2, 3, 4));

TEST_P(AveragingOfSize, trains_as_one_device_does_when_it_averages_every_batch) {
  expect_same_course(course_of(small_task(), averaging(GetParam())),
                     on_one_device(small_task(), averaging(GetParam())));
}

// By hand: replicas that train alone for h batches, then their mean.
std::vector<torch::Tensor> local_sgd_by_hand(int replicas, int every, int steps) {
  const StrategyOptions options = averaging(1);
  IntVector<std::unique_ptr<Strategy>> all;
  for (int i = 0; i < replicas; ++i) {
    StrategyOptions single = options;
    single.kind = StrategyKind::kSingle;
    all.push_back(strategy_of(small_task(), single));
  }
  const torch::NoGradGuard no_grad;
  for (int step = 0; step < steps; ++step) {
    for (int i = 0; i < replicas; ++i) {
      const torch::AutoGradMode grad(true);
      all[i]->forward_backward(lockstep::part_of(batch_of(step), i, replicas));
      all[i]->update();
    }
    if ((step + 1) % every != 0) continue;
    for (size_t p = 0; p < values_of(all[0]->model()).size(); ++p) {
      torch::Tensor mean = torch::zeros_like(all[0]->model().parameters()[p]);
      for (int i = 0; i < replicas; ++i)
        mean += all[i]->model().parameters()[p] * (static_cast<double>(even_part(kBatch, i, replicas).size()) / kBatch);
      for (const auto& strategy : all) strategy->model().parameters()[p].copy_(mean);
    }
    for (const auto& strategy : all) strategy->restored(step + 1);
  }
  return values_of(all[0]->model());
}

TEST(Averaging, is_local_sgd_when_it_averages_every_5_batches) {
  const Course course = course_of(small_task(), averaging(3, 5));
  expect_same_course({course.parameters, {}}, {local_sgd_by_hand(3, 5, kSteps), {}});
}

TEST(Averaging, averages_h_times_less_often) {
  const auto averages = [](int64_t every) {
    const auto strategy = strategy_of(small_task(), averaging(2, every));
    course_of(*strategy);
    const Report report = strategy->report();
    return std::map<std::string, double>(report.begin(), report.end())["averages"];
  };
  EXPECT_EQ(averages(1), 20);
  EXPECT_EQ(averages(5), 4);
  EXPECT_EQ(averages(6), 4);  // three times, and once more in synchronise()
}

// 2 ranks of 2 devices: the same averages as 4 devices of one rank.
TEST(Averaging, averages_over_ranks_too) {
  const Course one = course_of(small_task(), averaging(4, 2));
  std::mutex mutex;
  StrategyOptions options = averaging(2, 2);
  options.places = test_places(options.devices);
  run_ranks(2, [&](World& world) {
    const auto strategy = make_strategy(world, small_task(), options);
    Course course;
    for (int step = 0; step < kSteps; ++step) {
      // Parts of 2, 3, 2 and 3 samples, as one process with 4 devices makes them.
      course.losses.push_back(strategy->forward_backward(part_of(batch_of(step), world)).mean_loss);
      strategy->update();
    }
    strategy->synchronise();
    course.parameters = values_of(strategy->model());
    const std::lock_guard lock(mutex);
    expect_same_course(course, one);
    const Report report = strategy->report();
    std::map<std::string, double> numbers(report.begin(), report.end());
    EXPECT_EQ(numbers["exchanged_bytes"], 10 * numbers["block_bytes"]);
  });
}

// Each replica has its own momentum until synchronise() makes the replicas one model, as a checkpoint needs it.
TEST(Averaging, synchronises_parameters_and_optimizer_state_of_all_ranks) {
  StrategyOptions options = averaging(2, 3);
  std::get<SGDOptions>(options.optimizer).momentum = 0.9;
  run_ranks(3, [&](World& world) {
    const auto strategy = make_strategy(world, small_task(), options);
    for (int step = 0; step < 4; ++step) {
      strategy->forward_backward(part_of(batch_of(step), world));
      strategy->update();
    }
    strategy->synchronise();
    for (const torch::Tensor& parameter : strategy->model().parameters()) {
      const torch::Tensor momentum = strategy->optimizer().state_of(parameter).at("momentum_buffer");
      EXPECT_GT(momentum.norm().item<double>(), 0);
      const torch::Tensor all = world.all_gather(momentum);
      const torch::Tensor values = world.all_gather(parameter.detach());
      for (int rank = 1; rank < world.size(); ++rank) {
        EXPECT_TRUE(torch::equal(all[rank], all[0]));
        EXPECT_TRUE(torch::equal(values[rank], values[0]));
      }
    }
  });
}

TEST(Averaging, refuses_parameters_of_16_bits) {
  Task task = small_task();
  task.make_model = [] {
    torch::nn::Sequential net(torch::nn::Linear(6, 4));
    net->to(torch::kBFloat16);
    return net.ptr();
  };
  EXPECT_TRUE(contains(message_of<UsageError>([&] { strategy_of(task, averaging(2)); }),
                       "parameters of BFloat16 can't be averaged"));
}

TEST(Averaging, takes_the_outer_step_of_diloco) {
  StrategyOptions options = averaging(1, 10);
  options.averaging.outer_lr = 0.7;
  options.averaging.outer_momentum = 0.9;
  const Course course = course_of(small_task(), options);
  // By hand: two rounds of ten steps of one replica.
  StrategyOptions single = options;
  single.kind = StrategyKind::kSingle;
  const auto inner = strategy_of(small_task(), single);
  auto anchor = values_of(inner->model());
  std::vector<torch::Tensor> velocity;
  for (const auto& value : anchor) velocity.push_back(torch::zeros_like(value));
  for (int step = 0; step < kSteps; ++step) {
    inner->forward_backward(batch_of(step));
    inner->update();
    if ((step + 1) % 10 != 0) continue;
    const torch::NoGradGuard no_grad;
    for (size_t p = 0; p < anchor.size(); ++p) {
      const torch::Tensor gradient = anchor[p] - inner->model().parameters()[p];
      velocity[p] = 0.9 * velocity[p] + gradient;
      anchor[p] = anchor[p] - 0.7 * (gradient + 0.9 * velocity[p]);
      inner->model().parameters()[p].copy_(anchor[p]);
    }
    inner->restored(step + 1);
  }
  expect_same_course({course.parameters, {}}, {anchor, {}});
}

// ---- In parts and in the background

constexpr int64_t kUnit = 8;  // float64 in a cache line: where parameters and parts begin

torch::Tensor flat_values(torch::nn::Module& model) {
  Tensors all;
  for (const torch::Tensor& p : model.parameters())
    all.push_back(torch::constant_pad_nd(p.detach().flatten(), {0, (kUnit - p.numel() % kUnit) % kUnit}));
  return torch::cat(all);
}

void set_flat_values(torch::nn::Module& model, const torch::Tensor& values) {
  int64_t offset = 0;
  for (torch::Tensor& p : model.parameters()) {
    p.copy_(values.slice(0, offset, offset + p.numel()).view(p.sizes()));
    offset += (p.numel() + kUnit - 1) / kUnit * kUnit;
  }
}

// The same on one thread, with a replica for each of all devices. In int8, machines[i] is that of replica i.
class StreamedByHand {
 public:
  StreamedByHand(StrategyOptions options, const Nodes& machines) : options_(options.averaging), machines_(machines) {
    options.kind = StrategyKind::kSingle;
    options.devices = 1;
    options.places = {};
    for (size_t i = 0; i < machines.size(); ++i)
      replicas_.push_back(make_strategy(World::single(), small_task(), options));
    const torch::Tensor first = flat_values(replicas_[0]->model());
    for (int i = 0; i < static_cast<int>(options_.parts); ++i) {
      const Range range = even_part(first.numel() / kUnit, i, static_cast<int>(options_.parts));
      Part& part = parts_.emplace_back();
      part.begin = range.begin * kUnit;
      part.end = range.end * kUnit;
      part.anchor = first.slice(0, part.begin, part.end).clone().requires_grad_();
      part.outer = std::make_unique<SGD>(Tensors{part.anchor}, SGDOptions{.lr = options_.outer_lr,
                                                                          .momentum = options_.outer_momentum,
                                                                          .nesterov = options_.outer_momentum > 0});
      for (int machine = 0; machine <= machines.back(); ++machine)
        part.lost.push_back(torch::zeros({part.end - part.begin}, first.options()));
    }
  }

  std::vector<torch::Tensor> train(int steps) {
    for (int step = 0; step < steps; ++step) {
      for (int i = 0; i < replicas_.size(); ++i) {
        replicas_[i]->forward_backward(lockstep::part_of(batch_of(step), i, replicas_.size()));
        replicas_[i]->update();
      }
      const torch::NoGradGuard no_grad;
      for (size_t p = 0; p < parts_.size(); ++p) {
        Part& part = parts_[p];
        part.is_fresh = true;
        if (part.arrives == step) take(part, options_.mix);
        if (step % options_.every + 1 != options_.every * static_cast<int64_t>(p + 1) / options_.parts) continue;
        send(part, step + options_.delay);
        if (options_.delay == 0) take(part, 0);
      }
      for (const auto& replica : replicas_) replica->restored(step + 1);
    }
    const torch::NoGradGuard no_grad;
    for (Part& part : parts_) {
      if (part.arrives >= 0) take(part, options_.mix);
      if (part.is_fresh) send(part, steps);
      if (part.is_fresh || part.arrives >= 0) take(part, 0);
      mix(part, 0);
    }
    return values_of(replicas_[0]->model());
  }

 private:
  struct Part {
    int64_t begin = 0, end = 0;
    torch::Tensor anchor{}, change{};
    std::unique_ptr<SGD> outer{};
    Tensors lost{};
    int64_t arrives = -1;
    bool is_fresh = false;  // trained on since it was sent
  };

  void send(Part& part, int64_t arrives) {
    part.change = torch::zeros_like(part.anchor);
    Tensors sums;
    for (const torch::Tensor& lost : part.lost) sums.push_back(torch::zeros_like(lost));
    for (int i = 0; i < replicas_.size(); ++i) {
      const double weight = static_cast<double>(even_part(kBatch, i, replicas_.size()).size()) / kBatch;
      sums[static_cast<size_t>(machines_[static_cast<size_t>(i)])] +=
          (flat_values(replicas_[i]->model()).slice(0, part.begin, part.end) - part.anchor) * weight;
    }
    for (size_t m = 0; m < sums.size(); ++m)
      part.change += options_.in == AverageIn::kInt8
                         ? from_int8(take_int8(part.lost[m].add_(sums[m])), sums[m].numel(), sums[m].options())
                         : sums[m];
    part.arrives = arrives;
    part.is_fresh = false;
  }

  void take(Part& part, double own) {
    part.anchor.mutable_grad() = -part.change;
    part.outer->step();
    part.arrives = -1;
    mix(part, own);
  }

  void mix(const Part& part, double own) {
    for (const auto& replica : replicas_) {
      const torch::Tensor values = flat_values(replica->model());
      const torch::Tensor mine = values.slice(0, part.begin, part.end);
      mine.copy_(own == 0 ? part.anchor.detach() : mine * own + part.anchor * (1 - own));
      set_flat_values(replica->model(), values);
    }
  }

  AveragingOptions options_;
  Nodes machines_;
  IntVector<std::unique_ptr<Strategy>> replicas_;
  std::vector<Part> parts_;
};

StrategyOptions streamed(int64_t parts, int64_t delay, AverageIn in = AverageIn::kFloat32) {
  StrategyOptions options = averaging(1);
  options.averaging = {
      .every = 6, .outer_lr = 0.7, .outer_momentum = 0.9, .parts = parts, .delay = delay, .mix = 0.25, .in = in};
  return options;
}

Course train_part_of(World& world, Strategy& strategy, int begin, int end) {
  for (int step = begin; step < end; ++step) {
    strategy.forward_backward(part_of(batch_of(step), world));
    strategy.update();
  }
  strategy.synchronise();
  return {values_of(strategy.model()), {}};
}

// Every rank has the same bits, and they are those that were found by hand but for rounding.
void expect_streamed(int ranks, Fabric fabric, const StrategyOptions& options) {
  SCOPED_TRACE(concat(name_of(fabric), ", ", options.averaging.parts, " parts, delay ", options.averaging.delay));
  std::mutex mutex;
  std::vector<Course> courses;
  run_over(fabric, ranks, [&](World& world) {
    const Course course = train_part_of(world, *make_strategy(world, small_task(), options), 0, kSteps);
    const std::lock_guard lock(mutex);
    courses.push_back(course);
  });
  for (const Course& course : courses) expect_same_bits(course, courses.front());
  Nodes machines = fabric == Fabric::kLonelyHosts ? lonely(ranks) : spread(ranks);
  if (options.devices > 1) machines = Nodes(static_cast<size_t>(ranks * options.devices));  // never in int8
  expect_same_course(courses.front(), {StreamedByHand(options, machines).train(kSteps), {}});
}

TEST_P(AveragingOfSize, streams_parts_as_by_hand) {
  for (const auto& [parts, delay] : {std::pair{1, 0}, {1, 2}, {3, 0}, {3, 2}, {2, 6}})
    for (const Fabric fabric : {Fabric::kSharedMemory, Fabric::kLonelyHosts, Fabric::kHosts})
      expect_streamed(GetParam(), fabric, streamed(parts, delay));
}

TEST_P(AveragingOfSize, streams_int8_between_machines_as_by_hand) {
  if (GetParam() == 1) return;  // nothing is sent
  for (const auto& [parts, delay] : {std::pair{1, 0}, {3, 2}})
    for (const Fabric fabric : {Fabric::kLonelyHosts, Fabric::kHosts})
      expect_streamed(GetParam(), fabric, streamed(parts, delay, AverageIn::kInt8));
}

TEST(Averaging, streams_from_several_devices_in_a_rank) {
  StrategyOptions options = streamed(3, 2);
  options.devices = 2;
  options.places = test_places(2);
  expect_streamed(2, Fabric::kSharedMemory, options);
}

// The step by hand is that of one replica: no mean is rounded.
TEST(Averaging, in_one_part_without_delay_has_the_bits_of_diloco) {
  const StrategyOptions options = streamed(1, 0);
  const Course course = course_of(*make_strategy(World::single(), small_task(), options));
  const auto inner = make_strategy(World::single(), small_task(), on_one(options));
  const torch::Tensor anchor = flat_values(inner->model()).requires_grad_();
  SGD outer({anchor}, {.lr = 0.7, .momentum = 0.9, .nesterov = true});
  for (int step = 0; step < kSteps; ++step) {
    inner->forward_backward(batch_of(step));
    inner->update();
    if ((step + 1) % 6 != 0 && step + 1 != kSteps) continue;
    const torch::NoGradGuard no_grad;
    torch::Tensor(anchor).mutable_grad() = anchor.detach() - flat_values(inner->model());
    outer.step();
    set_flat_values(inner->model(), anchor.detach());
    inner->restored(step + 1);
  }
  expect_same_bits({course.parameters, {}}, {values_of(inner->model()), {}});
}

// 7 batches: two parts are under way.
TEST(Averaging, continues_from_a_checkpoint_while_parts_are_under_way) {
  for (const AverageIn in : {AverageIn::kFloat32, AverageIn::kInt8})
    run_over_machines({0, 0, 1}, [in](World& world) {
      const StrategyOptions options = streamed(3, 4, in);
      const auto whole = make_strategy(world, small_task(), options);
      const Course saved = train_part_of(world, *whole, 0, 7);
      std::map<std::string, torch::Tensor> state;
      for (const auto& [name, tensor] : whole->state()) state[name] = tensor.clone();
      const auto resumed = make_strategy(world, small_task(), options);
      {
        const torch::NoGradGuard no_grad;
        for (size_t i = 0; i < saved.parameters.size(); ++i)
          resumed->model().parameters()[i].copy_(saved.parameters[i]);
        for (const auto& [name, tensor] : resumed->state()) tensor.copy_(state.at(name));
      }
      resumed->restored(7);
      expect_same_bits(train_part_of(world, *resumed, 7, kSteps), train_part_of(world, *whole, 7, kSteps));
    });
}

TEST(Averaging, sends_a_byte_for_a_number_in_int8) {
  run_over_machines({0, 1}, [](World& world) {
    const auto bytes = [&](AverageIn in) {
      const auto strategy = make_strategy(world, small_task(), streamed(1, 0, in));
      for (int step = 0; step < 6; ++step) {
        strategy->forward_backward(part_of(batch_of(step), world));
        strategy->update();
      }
      const Report report = strategy->report();
      std::map<std::string, double> numbers(report.begin(), report.end());
      return std::pair(numbers["exchanged_bytes"], numbers["block_bytes"]);
    };
    const auto [exact, block] = bytes(AverageIn::kFloat32);
    EXPECT_EQ(exact, block);
    EXPECT_EQ(bytes(AverageIn::kInt8).first, block / 8 + 4);  // of float64; and a scale
  });
}

// The rounding errors of all machines of a run reach the sum of any number of machines that resume it.
TEST(BackgroundSum, takes_what_was_lost_along_to_other_machines) {
  const auto options = torch::TensorOptions(torch::kFloat64);
  const auto sum_of = [](BackgroundSum& sums, const torch::Tensor& mine) {
    sums.start(0, mine.clone());
    return sums.finish(0);
  };
  const torch::Tensor saved = torch::zeros({9}, options), like = saved.clone();
  run_over_machines({0, 0, 1}, [&](World& world) {
    BackgroundSum sums(world, {like}, true);
    const torch::Tensor sum = sum_of(sums, torch::arange(9, options) + 1);
    sums.even_out();
    if (world.rank() == 0) saved.copy_(sums.state().front().tensor);
    EXPECT_TRUE(torch::allclose(sum + sums.state().front().tensor, 3 * (torch::arange(9, options) + 1)));
  });
  EXPECT_GT(saved.norm().item<double>(), 0);
  for (const Nodes& machines : {Nodes{0}, {0, 0}, {0, 1}, {0, 1, 1, 2}}) {
    const auto resume = [&](World& world) {
      BackgroundSum sums(world, {like}, true);
      const NamedTensors state = sums.state();
      ASSERT_EQ(state.size(), 1U);
      torch::Tensor(state.front().tensor).copy_(saved);
      sums.restored();
      const torch::Tensor sum = sum_of(sums, like);
      sums.even_out();
      EXPECT_GT(sum.norm().item<double>(), 0);
      EXPECT_TRUE(torch::allclose(sum + sums.state().front().tensor, saved)) << machines.size();
    };
    machines.back() == 0 ? run_ranks(static_cast<int>(machines.size()), resume) : run_over_machines(machines, resume);
  }
}

TEST(BackgroundSum, keeps_no_block_in_int8_on_one_machine) {
  constexpr int64_t kElements = int64_t{1} << 26;
  const auto resident_bytes = [] {
    int64_t all = 0, pages = 0;
    std::ifstream("/proc/self/statm") >> all >> pages;
    return pages * ::sysconf(_SC_PAGESIZE);
  };
  const torch::Tensor part = torch::empty({kElements});
  const int64_t before = resident_bytes();
  const BackgroundSum sums(World::single(), {part}, true);
  EXPECT_LT(resident_bytes() - before, kElements);
}

// Machine 1 is late for each part, by much less than the timeout, and for all together by more.
TEST(BackgroundSum, lets_a_machine_wait_longer_than_the_timeout_while_sums_arrive) {
  constexpr std::chrono::seconds kTimeout{3}, kLate{1};
  constexpr size_t kParts = 4;
  const auto work = [&](World& world) {
    BackgroundSum sums(world, Tensors(kParts, torch::zeros({5})), false);
    for (size_t i = 0; i < kParts; ++i) {
      if (world.node_rank() == 1) std::this_thread::sleep_for(kLate);
      sums.start(i, torch::full({5}, static_cast<float>(world.rank() + 1)));
    }
    for (size_t i = kParts; i-- > 0;) EXPECT_TRUE(sums.finish(i).eq(6).all().item<bool>());
  };
  run_over_machines({0, 0, 1}, work, {.timeout = kTimeout});
}

TEST(Averaging, ends_all_threads_with_the_exception_of_one) {
  Task task = small_task();
  task.forward = [](torch::nn::Module& model, const torch::Tensor& data) {
    if (data.size(0) == 4) throw DataError({.what = "thrown on the device with 4 samples"});
    return dynamic_cast<torch::nn::SequentialImpl&>(model).forward(data);
  };
  const auto strategy = strategy_of(task, averaging(3));
  EXPECT_TRUE(contains(message_of<DataError>([&] { strategy->forward_backward(batch_of(0)); }), "with 4 samples"));
}

TEST(Averaging, refuses_options_out_of_range) {
  const auto refusal = [](const StrategyOptions& options) {
    return message_of<UsageError>([&] { strategy_of(small_task(), options); });
  };
  EXPECT_TRUE(contains(refusal(averaging(2, 0)), "--average-every 0"));
  StrategyOptions options = averaging(2);
  options.averaging.outer_lr = 0;
  EXPECT_TRUE(contains(refusal(options), "--outer-lr 0"));
  EXPECT_TRUE(contains(refusal(streamed(7, 0)), "--average-parts 7"));
  EXPECT_TRUE(contains(refusal(streamed(0, 0)), "--average-parts 0"));
  EXPECT_TRUE(contains(refusal(streamed(1, 7)), "--average-delay 7"));
  options = streamed(1, 1);
  options.averaging.mix = 1;
  EXPECT_TRUE(contains(refusal(options), "--average-mix 1"));
}

TEST(FlatBlock, holds_every_weight_and_keeps_values_shapes_and_strides) {
  torch::nn::Conv2d conv(3, 4, 3);
  set_layout(*conv, Layout::kChannelsLast);
  const auto before = values_of(*conv);
  const torch::Tensor block = make_flat_block(named_parameters(*conv), World::single());
  const auto after = conv->parameters();
  for (size_t i = 0; i < before.size(); ++i) {
    EXPECT_TRUE(torch::equal(after[i], before[i]));
    EXPECT_EQ(after[i].strides(), before[i].strides());
    EXPECT_TRUE(after[i].is_alias_of(block));
  }
  block.zero_();
  EXPECT_TRUE(after[0].eq(0).all().item<bool>());
}

TEST(FlatBlock, names_a_parameter_of_another_dtype) {
  torch::nn::Sequential net(torch::nn::Linear(2, 2), torch::nn::Linear(2, 2));
  net[1]->to(torch::kFloat64);
  const auto flatten = [&] { make_flat_block(named_parameters(*net), World::single()); };
  EXPECT_TRUE(contains(message_of<UsageError>(flatten), "1.weight is Double"));
}

}  // namespace
}  // namespace lockstep
