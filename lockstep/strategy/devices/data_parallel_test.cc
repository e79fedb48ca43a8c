// SPDX-License-Identifier: Apache-2.0
#include "lockstep/strategy.h"

#include <atomic>
#include <map>
#include <optional>

#include "tests/strategies.h"
#include "tests/support.h"

namespace lockstep {
namespace {

using namespace testing;

StrategyOptions data_parallel(int devices) {
  return {.kind = StrategyKind::kDataParallel,
          .optimizer = SGDOptions{.lr = 0.1, .momentum = 0.9},
          .seed = 4,
          .devices = devices};
}

class DataParallelOfSize : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Sizes, DataParallelOfSize, ::testing::Values(1, 2, 3, 4));

TEST_P(DataParallelOfSize, trains_as_one_device_does) {
  expect_same_course(course_of(small_task(), data_parallel(GetParam())),
                     on_one_device(small_task(), data_parallel(GetParam())));
}

// Exact, though the loss is not a mean over samples: the outputs are gathered first.
TEST_P(DataParallelOfSize, computes_the_loss_over_the_whole_batch) {
  Task task = small_task();
  task.loss = [](const torch::Tensor& output, const torch::Tensor&) { return output.std(); };
  expect_same_course(course_of(task, data_parallel(GetParam()), 5), on_one_device(task, data_parallel(GetParam()), 5));
}

TEST(DataParallel, trains_a_layer_that_is_used_twice) {
  expect_same_course(course_of(tied_task(), data_parallel(2)), on_one_device(tied_task(), data_parallel(2)));
}

TEST(DataParallel, trains_with_fewer_samples_than_devices) {
  expect_same_course(course_of(small_task(), data_parallel(4), 5, 2),
                     on_one_device(small_task(), data_parallel(4), 5, 2));
}

TEST(DataParallel, reports_how_much_more_device_0_holds) {
  const auto strategy = strategy_of(small_task(), data_parallel(2));
  course_of(*strategy);
  const Report report = strategy->report();
  std::map<std::string, double> numbers(report.begin(), report.end());
  const double parameters = 8.0 * (6 * 8 + 8 + 8 * 7 + 7 + 7 * 5 + 5 + 5 * 4 + 4);
  EXPECT_EQ(numbers["other_device_bytes"], parameters);  // gradients
  EXPECT_EQ(numbers["device_0_bytes"],
            3 * parameters + 2 * 8.0 * 4 * kBatch);  // gradients, parameters, momentum; outputs
  EXPECT_GT(numbers["device_0_busy_seconds"], 0);
  EXPECT_GT(numbers["other_device_busy_seconds"], 0);
}

TEST(DataParallel, frees_the_gathered_outputs_before_backward) {
  std::atomic<int> hooks{0}, kept{0};
  std::optional<c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>> gathered;
  Task task = small_task();
  task.forward = [&](torch::nn::Module& model, const torch::Tensor& data) {
    const torch::Tensor output = dynamic_cast<torch::nn::SequentialImpl&>(model).forward(data);
    output.register_hook([&](const torch::Tensor&) {
      ++hooks;
      kept += gathered->expired() ? 0 : 1;
    });
    return output;
  };
  task.loss = [&](const torch::Tensor& output, const torch::Tensor& target) {
    gathered.emplace(output.getIntrusivePtr());
    return torch::cross_entropy_loss(output, target);
  };
  const auto strategy = strategy_of(task, data_parallel(2));
  strategy->forward_backward(batch_of(0));
  EXPECT_EQ(hooks, 2);
  EXPECT_EQ(kept, 0);
}

TEST(DataParallel, passes_on_what_the_loss_throws) {
  Task task = small_task();
  task.loss = [](const torch::Tensor&, const torch::Tensor&) -> torch::Tensor {
    throw DataError({.what = "thrown in the loss"});
  };
  const auto strategy = strategy_of(task, data_parallel(2));
  EXPECT_TRUE(contains(message_of<DataError>([&] { strategy->forward_backward(batch_of(0)); }), "thrown in the loss"));
}

}  // namespace
}  // namespace lockstep
