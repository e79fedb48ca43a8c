// SPDX-License-Identifier: Apache-2.0
#include "lockstep/step/update/update_journal.h"

#include "lockstep/collective/shm/memory/arena.h"
#include "lockstep/model/parameter_block.h"
#include "lockstep/step/accumulated_batches.h"
#include "lockstep/step/exchange.h"
#include "tests/support.h"

namespace lockstep {
namespace {

using testing::contains;
using testing::message_of;

// A rank that is alone, whose memory outlives it.
class KeptRank {
 public:
  explicit KeptRank(const OptimizerOptions& options, int64_t width = 6, std::vector<NamedTensor> more = {}) {
    torch::manual_seed(3);
    std::vector<NamedTensor> parameters{{"weight", torch::randn({width, 700}).set_requires_grad(true)},
                                        {"bias", torch::randn({width}).set_requires_grad(true)}};
    std::ranges::move(more, std::back_inserter(parameters));
    for (const auto& [name, tensor] : parameters) parameters_.push_back(tensor);
    block_ = std::make_shared<ParameterBlock>(*memory_, parameters);
    source_ = publish_gradients(memory_, parameters, {.block = block_});
    optimizer_ = make_optimizer(parameters_, options);
    optimizer_->attach(source_);
  }

  void step(int number) {
    const torch::Tensor inputs = torch::full({2, 700}, 0.125 * number);
    const torch::Tensor loss = (inputs.matmul(parameters_[0].t()) + parameters_[1]).square().mean();
    const double factor = source_->begin(2, loss);
    run_backward(loss, factor);
    source_->end();
    source_->finish();
    optimizer_->step();
    optimizer_->zero_grad();
  }

  uint64_t take_over(const KeptRank& lost) {
    const auto find = [&](int, uint64_t offset, size_t bytes) { return lost.arena_->window().at(offset, bytes); };
    const uint64_t calls = optimizer_->take_over(lost.optimizer_->manifest(), find);
    block_->mark_written();
    return calls;
  }

  Optimizer& optimizer() { return *optimizer_; }
  const torch::Tensor& parameter(size_t i) const { return parameters_[i]; }

 private:
  std::shared_ptr<shm::Arena> arena_ = std::make_shared<shm::Arena>(shm::make_segment("kept", 0), "kept");
  std::shared_ptr<SharedMemory> memory_ = SharedMemory::alone(arena_);
  std::vector<torch::Tensor> parameters_;
  std::shared_ptr<ParameterBlock> block_;
  std::shared_ptr<Exchange> source_;
  std::shared_ptr<Optimizer> optimizer_;
};

TEST(TakenOver, goes_on_with_the_same_bits) {
  for (const std::string& name : optimizer_names()) {
    const OptimizerOptions options = optimizer_options(name, {{"lr", 0.01}, {"momentum", 0.9}});
    KeptRank lost(options), next(options), undisturbed(options);
    for (int step = 1; step <= 4; ++step) {
      undisturbed.step(step);
      if (step <= 2) lost.step(step);
    }
    EXPECT_EQ(next.take_over(lost), 2u);
    EXPECT_TRUE(torch::equal(next.parameter(0), lost.parameter(0)));
    for (int step = 3; step <= 4; ++step) next.step(step);
    for (const size_t i : {0, 1}) {
      EXPECT_TRUE(torch::equal(next.parameter(i), undisturbed.parameter(i))) << name;
      for (const auto& [key, tensor] : undisturbed.optimizer().state_of(undisturbed.parameter(i)))
        EXPECT_TRUE(torch::equal(next.optimizer().state_of(next.parameter(i)).at(key), tensor)) << name << ' ' << key;
    }
  }
}

TEST(TakenOver, is_what_was_restored_if_there_was_no_step_since) {
  KeptRank first(SGDOptions{.momentum = 0.9}), second(SGDOptions{.momentum = 0.9}), third(SGDOptions{.momentum = 0.9});
  first.step(1);
  EXPECT_EQ(second.take_over(first), 1u);
  EXPECT_EQ(third.take_over(second), 0u);
  EXPECT_TRUE(torch::equal(third.parameter(0), first.parameter(0)));
  EXPECT_EQ(third.optimizer().state_of(third.parameter(0)).at("step").item<float>(), 1);
}

TEST(TakenOver, goes_on_where_parameters_have_no_elements) {
  const auto kept_rank = [](bool with_masters) {
    const auto empty = [](torch::IntArrayRef sizes, torch::ScalarType dtype) {
      return torch::zeros(sizes, dtype).set_requires_grad(true);
    };
    std::vector<NamedTensor> more{{"empty", empty({0, 3}, torch::kFloat32)}, {"flat", empty({3, 0}, torch::kFloat32)}};
    if (with_masters) more.push_back({"half", empty({0}, torch::kBFloat16)});
    return KeptRank(SGDOptions{.momentum = 0.9}, 6, std::move(more));
  };
  for (const bool with_masters : {false, true}) {
    KeptRank lost = kept_rank(with_masters), next = kept_rank(with_masters);
    lost.step(1);
    EXPECT_EQ(next.take_over(lost), 1u);
    EXPECT_TRUE(torch::equal(next.parameter(0), lost.parameter(0)));
  }
}

TEST(TakenOver, refuses_another_model) {
  KeptRank lost(SGDOptions{.momentum = 0.9}), wider(SGDOptions{.momentum = 0.9}, 7);
  EXPECT_TRUE(contains(message_of<CheckpointError>([&] { wider.take_over(lost); }), "not those of the ranks"));
}

TEST(TakenOver, needs_memory_that_outlives_the_rank) {
  const torch::Tensor parameter = torch::ones({3}).set_requires_grad(true);
  SGD sgd({parameter}, {});
  parameter.mutable_grad() = torch::ones({3});
  sgd.step();
  EXPECT_EQ(sgd.manifest(), "");
}

}  // namespace
}  // namespace lockstep
