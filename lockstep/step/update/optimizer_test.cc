// SPDX-License-Identifier: Apache-2.0
#include <ATen/Parallel.h>
#include <gtest/gtest.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <mutex>
#include <set>
#include <thread>

#include "lockstep/optimizers.h"
#include "lockstep/schedule.h"
#include "lockstep/step/exchange.h"
#include "lockstep/step/update/flat_update.h"
#include "tests/support.h"

namespace lockstep {
namespace {

using testing::contains;
using testing::message_of;

// Parameters of odd sizes and layouts, in float64; the second one never gets a gradient.
Tensors make_parameters() {
  torch::manual_seed(3);
  const auto f64 = torch::TensorOptions().dtype(torch::kFloat64);
  Tensors parameters = {torch::randn({5, 3}, f64), torch::randn({7}, f64),
                        torch::randn({4, 3, 3, 3}, f64).contiguous(torch::MemoryFormat::ChannelsLast)};
  for (auto& parameter : parameters) parameter.set_requires_grad(true);
  return parameters;
}

void set_gradients(const Tensors& parameters, int step) {
  torch::manual_seed(100 + step);
  for (size_t i : {0, 2}) parameters[i].mutable_grad() = torch::randn_like(parameters[i].detach());
}

void expect_same(const Tensors& a, const Tensors& b) {
  for (size_t i = 0; i < a.size(); ++i) EXPECT_TRUE(torch::allclose(a[i], b[i], 1e-12, 1e-12)) << "parameter " << i;
}

void expect_same_course(torch::optim::Optimizer& mine, const Tensors& my_parameters, torch::optim::Optimizer& theirs,
                        const Tensors& their_parameters) {
  for (int step = 0; step < 5; ++step) {
    set_gradients(my_parameters, step);
    set_gradients(their_parameters, step);
    mine.step();
    theirs.step();
    expect_same(my_parameters, their_parameters);
  }
}

// Notes which threads update.
class NotingRule : public UpdateRule {
 public:
  void update(const Group&, const Elements<float>&) const override {
    const std::lock_guard lock(mutex_);
    threads_.insert(std::this_thread::get_id());
  }
  void update(const Group&, const Elements<double>&) const override {}
  void update_on_device(const Group&, const WholeTensors&) const override {}
  int threads() const { return static_cast<int>(threads_.size()); }

 private:
  mutable std::mutex mutex_;
  mutable std::set<std::thread::id> threads_;
};

TEST(FlatUpdate, spreads_a_step_over_torchs_threads_or_those_that_it_is_given) {
  const torch::Tensor parameter = torch::zeros({1 << 18});
  const torch::Tensor gradient = torch::ones_like(parameter);
  OptimizerState state{.parameters = {parameter}, .group_of = {0}, .steps = {0}};
  const auto flat = FlatUpdate::make(SharedMemory::alone(), state);
  WeightedGradients gradients{.weights = {1}, .pointers = {gradient.const_data_ptr()}};
  const std::vector<UpdateRule::Group> groups{torch::optim::OptimizerParamGroup({parameter})};
  const int before = at::get_num_threads();
  for (const int threads : {2, 1}) {
    at::set_num_threads(threads);
    const NotingRule rule;
    flat->run({rule, groups, gradients});
    EXPECT_EQ(rule.threads(), threads);
  }
  at::set_num_threads(before);
  int64_t chunks = 0;
  gradients.parallel_for = [&chunks](int64_t begin, int64_t end, int64_t, const auto& part) {
    std::thread([&] { part(begin, end); }).join();
    chunks = end - begin;
  };
  const NotingRule rule;
  flat->run({rule, groups, gradients});
  EXPECT_EQ(rule.threads(), 1);
  EXPECT_EQ(chunks, (1 << 18) / 4096);
}

TEST(SGD, follows_libtorchs_sgd) {
  struct Case {
    double momentum;
    bool nesterov;
    double weight_decay;
  };
  for (const Case& c : {Case{0, false, 0}, Case{0.9, false, 0}, Case{0.9, true, 0}, Case{0.8, true, 0.01}}) {
    const Tensors mine = make_parameters();
    const Tensors theirs = make_parameters();
    SGD sgd(mine, {.lr = 0.1, .momentum = c.momentum, .nesterov = c.nesterov, .weight_decay = c.weight_decay});
    torch::optim::SGD reference(
        theirs, torch::optim::SGDOptions(0.1).momentum(c.momentum).nesterov(c.nesterov).weight_decay(c.weight_decay));
    expect_same_course(sgd, mine, reference, theirs);
  }
}

TEST(RMSprop, follows_libtorchs_rmsprop) {
  for (const double momentum : {0.0, 0.9}) {
    const Tensors mine = make_parameters();
    const Tensors theirs = make_parameters();
    RMSprop rmsprop(mine, {.lr = 0.01, .alpha = 0.9, .eps = 1e-6, .weight_decay = 0.1, .momentum = momentum});
    torch::optim::RMSprop reference(
        theirs, torch::optim::RMSpropOptions(0.01).alpha(0.9).eps(1e-6).weight_decay(0.1).momentum(momentum));
    expect_same_course(rmsprop, mine, reference, theirs);
  }
}

TEST(Adagrad, follows_libtorchs_adagrad) {
  const Tensors mine = make_parameters();
  const Tensors theirs = make_parameters();
  Adagrad adagrad(mine, {.lr = 0.1, .lr_decay = 0.1, .weight_decay = 0.1, .eps = 1e-6});
  torch::optim::Adagrad reference(theirs, torch::optim::AdagradOptions(0.1).lr_decay(0.1).weight_decay(0.1).eps(1e-6));
  expect_same_course(adagrad, mine, reference, theirs);
}

TEST(AdamW, follows_libtorchs_adamw) {
  const Tensors mine = make_parameters();
  const Tensors theirs = make_parameters();
  AdamW adamw(mine, {.lr = 0.01, .beta1 = 0.8, .beta2 = 0.95, .weight_decay = 0.1});
  torch::optim::AdamW reference(theirs, torch::optim::AdamWOptions(0.01).betas({0.8, 0.95}).weight_decay(0.1));
  expect_same_course(adamw, mine, reference, theirs);
}

TEST(Adam, follows_libtorchs_adam) {
  const Tensors mine = make_parameters();
  const Tensors theirs = make_parameters();
  Adam adam(mine, {.lr = 0.01, .beta1 = 0.8, .beta2 = 0.95, .weight_decay = 0.1});
  torch::optim::Adam reference(theirs, torch::optim::AdamOptions(0.01).betas({0.8, 0.95}).weight_decay(0.1));
  expect_same_course(adam, mine, reference, theirs);
}

// Algorithm 2 of the paper, tensor by tensor.
TEST(LAMB, follows_the_papers_formula) {
  const Tensors mine = make_parameters();
  const Tensors theirs = make_parameters();
  LAMB lamb(mine, {.lr = 0.02, .beta1 = 0.8, .beta2 = 0.95, .eps = 1e-6, .weight_decay = 0.1});
  Tensors m(3), v(3);
  const torch::NoGradGuard no_grad;
  for (int step = 1; step <= 4; ++step) {
    set_gradients(mine, step);
    set_gradients(theirs, step);
    lamb.step();
    for (size_t i : {0, 2}) {
      const torch::Tensor g = theirs[i].grad();
      m[i] = 0.2 * g + (m[i].defined() ? 0.8 * m[i] : torch::zeros_like(g));
      v[i] = 0.05 * g * g + (v[i].defined() ? 0.95 * v[i] : torch::zeros_like(g));
      const torch::Tensor r = (m[i] / (1 - std::pow(0.8, step))) / ((v[i] / (1 - std::pow(0.95, step))).sqrt() + 1e-6);
      const torch::Tensor u = r + 0.1 * theirs[i];
      theirs[i].sub_(0.02 * (theirs[i].norm() / u.norm()) * u);
    }
    expect_same(mine, theirs);
  }
}

TEST(LARS, follows_the_papers_formula) {
  const Tensors mine = make_parameters();
  const Tensors theirs = make_parameters();
  LARS lars(mine, {.lr = 0.5, .momentum = 0.9, .weight_decay = 0.01, .trust = 0.02});
  Tensors v(3);
  const torch::NoGradGuard no_grad;
  for (int step = 0; step < 4; ++step) {
    set_gradients(mine, step);
    set_gradients(theirs, step);
    lars.step();
    for (size_t i : {0, 2}) {
      const torch::Tensor g = theirs[i].grad();
      const torch::Tensor p = theirs[i].norm();
      const torch::Tensor local = 0.02 * p / (g.norm() + 0.01 * p);
      v[i] = 0.5 * local * (g + 0.01 * theirs[i]) + (v[i].defined() ? 0.9 * v[i] : torch::zeros_like(g));
      theirs[i].sub_(v[i]);
    }
    expect_same(mine, theirs);
  }
}

TEST(Optimizer, clips_by_norm_and_by_value_as_libtorch_does) {
  const Tensors mine = make_parameters();
  const Tensors theirs = make_parameters();
  SGD sgd(mine, {.lr = 0.1});
  torch::optim::SGD reference(theirs, torch::optim::SGDOptions(0.1));
  for (const ClippingOptions& clipping :
       {ClippingOptions{.max_norm = 0.5}, ClippingOptions{.max_norm = 1e6}, ClippingOptions{.max_value = 0.25},
        ClippingOptions{.max_norm = 2, .max_value = 0.1}}) {
    set_gradients(mine, 7);
    set_gradients(theirs, 7);
    sgd.set_clipping(clipping);
    sgd.step();
    if (clipping.max_norm > 0) {
      const double norm = torch::nn::utils::clip_grad_norm_(theirs, clipping.max_norm);
      EXPECT_NEAR(sgd.gradient_norm(), norm, 1e-9);
    }
    if (clipping.max_value > 0) torch::nn::utils::clip_grad_value_(theirs, clipping.max_value);
    reference.step();
    expect_same(mine, theirs);
  }
}

TEST(Optimizer, skips_a_step_whose_scaled_gradients_overflowed) {
  const torch::Tensor p = torch::ones({3}).set_requires_grad(true);
  SGD sgd({p}, {.lr = 1});
  sgd.set_loss_scale(1024);
  p.mutable_grad() = torch::full({3}, std::numeric_limits<float>::infinity());
  sgd.step();
  EXPECT_TRUE(sgd.skipped());
  EXPECT_TRUE(torch::equal(p.detach(), torch::ones({3})));
  p.mutable_grad() = torch::full({3}, 512.0F);
  sgd.step();
  EXPECT_FALSE(sgd.skipped());
  EXPECT_TRUE(torch::equal(p.detach(), torch::full({3}, 0.5F)));
}

TEST(Optimizer, keeps_an_average_of_the_parameters) {
  const torch::Tensor p = torch::zeros({2}, torch::kFloat64).set_requires_grad(true);
  SGD sgd({p}, {.lr = 1});
  sgd.keep_average(0.75);
  for (int step = 0; step < 3; ++step) {  // p becomes 4, 8, 12
    p.mutable_grad() = torch::full({2}, -4.0, torch::kFloat64);
    sgd.step();
  }
  EXPECT_TRUE(torch::equal(sgd.state_of(p).at("ema"), torch::full({2}, 4 + 1 + (12 - 5) * 0.25, torch::kFloat64)));
  EXPECT_THROW(sgd.keep_average(0.5), UsageError) << "too late";
}

TEST(Optimizer, gives_each_group_its_own_options) {
  const torch::Tensor a = torch::ones({2}).set_requires_grad(true);
  const torch::Tensor b = torch::ones({2}).set_requires_grad(true);
  SGD sgd({a}, {.lr = 1});
  sgd.add_param_group(parameter_group({b}, SGDOptions{.lr = 0.5}));
  a.mutable_grad() = torch::ones({2});
  b.mutable_grad() = torch::ones({2});
  sgd.step();
  EXPECT_TRUE(torch::equal(a.detach(), torch::zeros({2})));
  EXPECT_TRUE(torch::equal(b.detach(), torch::full({2}, 0.5F)));
  sgd.add_param_group(parameter_group({torch::ones({1}).set_requires_grad(true)}, SGDOptions{}));
  EXPECT_TRUE(contains(message_of<UsageError>([&] { sgd.step(); }), "after the optimizer's first step"));
}

TEST(Optimizer, refuses_a_group_with_options_of_another_optimizer) {
  const torch::Tensor p = torch::ones({2}).set_requires_grad(true);
  SGD sgd({}, {.lr = 1});
  sgd.add_param_group(parameter_group({p}, AdamOptions{}));
  p.mutable_grad() = torch::ones({2});
  EXPECT_TRUE(contains(message_of<UsageError>([&] { sgd.step(); }), "options of another optimizer"));
}

// Many chunks, cut between parameters of different sizes and types, by several threads of one rank.
TEST(Optimizer, updates_large_parameters_as_small_ones) {
  Tensors mine, theirs;
  for (const int64_t size : {1, 4095, 4096, 4097, 100000})
    for (const auto dtype : {torch::kFloat32, torch::kFloat64}) {
      mine.push_back(torch::linspace(-1, 1, size, dtype).set_requires_grad(true));
      theirs.push_back(torch::linspace(-1, 1, size, dtype).set_requires_grad(true));
      mine.back().mutable_grad() = torch::linspace(2, 5, size, dtype);
      theirs.back().mutable_grad() = torch::linspace(2, 5, size, dtype);
    }
  SGD sgd(mine, {.lr = 0.125, .momentum = 0.5});
  torch::optim::SGD reference(theirs, torch::optim::SGDOptions(0.125).momentum(0.5));
  for (int step = 0; step < 2; ++step) {
    sgd.step();
    reference.step();
  }
  for (size_t i = 0; i < mine.size(); ++i) EXPECT_TRUE(torch::allclose(mine[i], theirs[i], 1e-6, 1e-6)) << i;
}

TEST(SGD, trains_16_bit_parameters_of_any_size) {
  for (const auto dtype : {torch::kBFloat16, torch::kFloat16}) {
    for (const int64_t size : {1, 8, 9, 64, 65}) {
      const torch::Tensor mine = torch::ones({size}, dtype).set_requires_grad(true);
      const torch::Tensor theirs = torch::ones({size}, dtype).set_requires_grad(true);
      SGD sgd({mine}, {.lr = 0.5, .momentum = 0.5, .nesterov = true});
      torch::optim::SGD reference({theirs}, torch::optim::SGDOptions(0.5).momentum(0.5).nesterov(true));
      for (int step = 0; step < 3; ++step) {
        mine.mutable_grad() = torch::ones({size}, dtype);
        theirs.mutable_grad() = torch::ones({size}, dtype);
        sgd.step();
        reference.step();
      }
      EXPECT_TRUE(torch::allclose(mine.to(torch::kFloat32), theirs.to(torch::kFloat32), 1e-2, 1e-2)) << size;
      EXPECT_LT(mine.max().item<float>(), 0);
    }
  }
}

TEST(SGD, takes_a_gradient_in_another_memory_order) {
  const torch::Tensor p = torch::zeros({2, 3}, torch::kFloat32).set_requires_grad(true);
  const torch::Tensor gradient = torch::arange(6, torch::kFloat32).reshape({3, 2}).t();
  p.mutable_grad() = gradient;
  SGD({p}, {.lr = 1}).step();
  EXPECT_TRUE(torch::equal(p.detach(), -gradient));
}

template <class O, class Options>
void expect_state_survives_a_copy(const Options& options) {
  const Tensors first = make_parameters();
  const Tensors second = make_parameters();
  O original(first, options);
  for (int step = 0; step < 3; ++step) {
    set_gradients(first, step);
    original.step();
  }
  O restarted(second, options);
  const torch::NoGradGuard no_grad;
  for (size_t i = 0; i < first.size(); ++i) {
    second[i].copy_(first[i]);
    restarted.set_state(second[i], original.state_of(first[i]));
  }
  set_gradients(first, 3);
  set_gradients(second, 3);
  original.step();
  restarted.step();
  for (size_t i = 0; i < first.size(); ++i) EXPECT_TRUE(torch::equal(first[i], second[i]));
  EXPECT_TRUE(original.state_of(first[1]).empty()) << "a parameter without a gradient has no state";
}

TEST(SGD, goes_on_from_a_saved_state) { expect_state_survives_a_copy<SGD>(SGDOptions{.lr = 0.1, .momentum = 0.9}); }
TEST(RMSprop, goes_on_from_a_saved_state) { expect_state_survives_a_copy<RMSprop>(RMSpropOptions{.momentum = 0.9}); }

TEST(Adagrad, goes_on_from_a_saved_state) { expect_state_survives_a_copy<Adagrad>(AdagradOptions{.lr_decay = 0.1}); }

TEST(AdamW, goes_on_from_a_saved_state) { expect_state_survives_a_copy<AdamW>(AdamWOptions{}); }

TEST(SGD, begins_again_from_an_empty_state) {
  const Tensors used = make_parameters(), fresh = make_parameters();
  SGD with_momentum(used, {.lr = 0.1, .momentum = 0.9}), other(fresh, {.lr = 0.1, .momentum = 0.9});
  set_gradients(used, 0);
  with_momentum.step();
  const torch::NoGradGuard no_grad;
  for (size_t i = 0; i < used.size(); ++i) {
    used[i].copy_(fresh[i]);
    with_momentum.set_state(used[i], other.state_of(fresh[i]));
  }
  set_gradients(used, 1);
  set_gradients(fresh, 1);
  with_momentum.step();
  other.step();
  expect_same(used, fresh);
}

TEST(SGD, refuses_a_state_of_another_shape) {
  const Tensors parameters = make_parameters();
  SGD sgd(parameters, {.momentum = 0.9});
  const std::string message = message_of<CheckpointError>([&] {
    sgd.set_state(parameters[0], {{"momentum_buffer", torch::zeros({2})}});
  });
  EXPECT_TRUE(contains(message, "momentum_buffer"));
}

TEST(SGD, refuses_options_that_make_no_sense) {
  EXPECT_THROW(SGD(make_parameters(), {.lr = -1}), UsageError);
  EXPECT_THROW(SGD(make_parameters(), {.lr = 1, .nesterov = true}), UsageError);
  EXPECT_THROW(AdamW(make_parameters(), {.beta1 = 1}), UsageError);
  EXPECT_THROW(RMSprop(make_parameters(), {.alpha = 1}), UsageError);
}

TEST(OptimizerOptions, choose_the_optimizer_by_name_and_keep_every_value) {
  EXPECT_EQ(optimizer_names(),
            (std::vector<std::string>{"sgd", "adam", "adamw", "lamb", "lars", "rmsprop", "adagrad"}));
  for (const std::string& name : optimizer_names()) {
    const OptimizerOptions options = optimizer_options(name, {{"lr", 0.25}, {"weight_decay", 0.5}, {"no such", 1}});
    EXPECT_EQ(name_of(options), name);
    const OptionValues values = values_of(options);
    EXPECT_EQ(values.at("lr"), 0.25);
    EXPECT_EQ(values.at("weight_decay"), 0.5);
    EXPECT_FALSE(values.contains("no such"));
    EXPECT_EQ(values_of(optimizer_options(name, values)), values);
    const auto optimizer = make_optimizer(make_parameters(), options);
    EXPECT_EQ(optimizer->param_groups().front().options().get_lr(), 0.25);
    EXPECT_EQ(layerwise(options), name == "lamb" || name == "lars");
  }
  EXPECT_TRUE(std::get<SGDOptions>(optimizer_options("sgd", {{"nesterov", 1}, {"momentum", 0.5}})).nesterov);
  EXPECT_TRUE(contains(message_of<UsageError>([] { optimizer_options("adadelta"); }), "sgd, adam, adamw, lamb, lars"));
}

TEST(SGD, runs_a_closure_and_returns_its_loss) {
  const Tensors parameters = make_parameters();
  SGD sgd(parameters, {.lr = 0.5});
  const torch::Tensor loss = sgd.step([&] {
    torch::Tensor sum = parameters[0].sum();
    sum.backward();
    return sum;
  });
  EXPECT_TRUE(torch::allclose(loss - parameters[0].sum(), torch::full({}, 7.5, torch::kFloat64)));
}

TEST(Schedule, set_learning_rate_reaches_every_group) {
  SGD sgd(make_parameters(), {.lr = 1});
  set_learning_rate(sgd, 0.25);
  EXPECT_EQ(sgd.param_groups()[0].options().get_lr(), 0.25);
}

TEST(Schedule, warms_up_linearly_and_then_follows_its_kind) {
  const ScheduleOptions cosine{.kind = ScheduleKind::kCosine, .warmup_steps = 4, .total_steps = 12};
  EXPECT_DOUBLE_EQ(schedule_factor(cosine, 0), 0.25);
  EXPECT_DOUBLE_EQ(schedule_factor(cosine, 3), 1);
  EXPECT_DOUBLE_EQ(schedule_factor(cosine, 4), 1);
  EXPECT_DOUBLE_EQ(schedule_factor(cosine, 8), 0.5);
  EXPECT_NEAR(schedule_factor(cosine, 12), 0, 1e-15);
  const ScheduleOptions linear{.kind = ScheduleKind::kLinear, .warmup_steps = 4, .total_steps = 12, .floor = 0.2};
  EXPECT_DOUBLE_EQ(schedule_factor(linear, 3), 1);
  EXPECT_DOUBLE_EQ(schedule_factor(linear, 6), 0.8);
  EXPECT_DOUBLE_EQ(schedule_factor(linear, 12), 0.2);
  EXPECT_DOUBLE_EQ(schedule_factor(linear, 20), 0.2);
  ScheduleOptions to_floor = cosine;
  to_floor.floor = 0.2;
  EXPECT_DOUBLE_EQ(schedule_factor(to_floor, 4), 1);
  EXPECT_DOUBLE_EQ(schedule_factor(to_floor, 8), 0.6);
  EXPECT_DOUBLE_EQ(schedule_factor(to_floor, 12), 0.2);
  const ScheduleOptions steps{.kind = ScheduleKind::kStep, .drop_every = 10, .drop_factor = 0.1};
  EXPECT_DOUBLE_EQ(schedule_factor(steps, 9), 1);
  EXPECT_DOUBLE_EQ(schedule_factor(steps, 25), 0.01);
  EXPECT_DOUBLE_EQ(schedule_factor({}, 1000), 1);
}

TEST(Schedule, scales_with_the_batch) {
  EXPECT_DOUBLE_EQ(scaled_learning_rate(0.001, LrScaling::kSqrt, 400, 100), 0.002);
  EXPECT_DOUBLE_EQ(scaled_learning_rate(0.001, LrScaling::kLinear, 400, 100), 0.004);
  EXPECT_DOUBLE_EQ(scaled_learning_rate(0.001, LrScaling::kNone, 400, 100), 0.001);
}

}  // namespace
}  // namespace lockstep
