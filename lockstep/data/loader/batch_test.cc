// SPDX-License-Identifier: Apache-2.0
#include "lockstep/batch.h"

#include <gtest/gtest.h>
#include <torch/data/datasets/base.h>

#include "lockstep/datasets.h"
#include "lockstep/error.h"
#include "lockstep/loader.h"
#include "lockstep/torch_dataset.h"
#include "tests/support.h"

namespace lockstep {
namespace {

using testing::contains;
using testing::message_of;

Batch sample_with_boxes(int64_t number, int64_t boxes = 2) {
  return {torch::full({3}, number), torch::tensor(number), {{"boxes", torch::full({boxes, 4}, number)}}};
}

TEST(BatchTensors, of_samples_are_stacked_by_name) {
  const Batch batch = stacked({sample_with_boxes(0), sample_with_boxes(1), sample_with_boxes(2)});
  EXPECT_EQ(batch.size(), 3);
  EXPECT_EQ(batch["boxes"].sizes(), (std::vector<int64_t>{3, 2, 4}));
  EXPECT_TRUE(torch::equal(batch["boxes"].select(1, 0).select(1, 0), batch.target));
  const Batch twice = concatenated({batch, batch.rows(1, 3)});
  EXPECT_TRUE(torch::equal(twice["boxes"].select(1, 0).select(1, 0), torch::tensor({0, 1, 2, 1, 2})));
}

TEST(BatchTensors, that_do_not_fit_are_named) {
  const auto refusal = [](const Batch& other) {
    return message_of<DataError>([&] { stacked({sample_with_boxes(0), other}); });
  };
  EXPECT_TRUE(contains(refusal(sample_with_boxes(1, 5)), "boxes has sizes [2, 4] and [5, 4] in one batch"));
  EXPECT_TRUE(contains(refusal({torch::zeros({3}), torch::tensor(1)}), "some samples of a batch have no boxes"));
  Batch more = sample_with_boxes(1);
  more.more["length"] = torch::tensor(1);
  EXPECT_TRUE(contains(refusal(more), "some samples of a batch have no length"));
  EXPECT_TRUE(contains(refusal({torch::zeros({4}), torch::tensor(1), more.more}), "data has sizes [3] and [4]"));
}

TEST(BatchTensors, are_changed_each) {
  const Batch batch = stacked({sample_with_boxes(1)}).map([](const torch::Tensor& each) { return -each; });
  EXPECT_EQ(batch.data.sum().item<int>() + batch.target.item<int>() + batch["boxes"].sum().item<int>(), -3 - 1 - 8);
  EXPECT_FALSE(Batch{torch::ones({2})}.map([](const torch::Tensor& each) { return each; }).target.defined());
}

TEST(BatchTensors, of_a_tensor_dataset_keep_their_dtype_and_their_rows) {
  const torch::Tensor numbers = torch::arange(7);
  const auto dataset = std::make_shared<TensorDataset>("numbers", numbers, numbers,
                                                       TensorDataset::More{{"odd", numbers.remainder(2).eq(1)}});
  Loader loader(World::single(), dataset, {.batch_size = 3, .workers = 2});
  int64_t seen = 0;
  for (const Batch& batch : loader.epoch(0)) {
    EXPECT_TRUE(torch::equal(batch["odd"], batch.target.remainder(2).eq(1)));
    seen += batch["odd"].size(0);
  }
  EXPECT_EQ(seen, 7);
  EXPECT_TRUE(contains(message_of<DataError>([&] {
                         TensorDataset("numbers", numbers, numbers, {{"odd", torch::ones({6})}});
                       }),
                       "odd has shape [6] in a batch of 7 samples"));
}

class WithBoxes : public torch::data::datasets::Dataset<WithBoxes, Batch> {
 public:
  Batch get(size_t index) override { return sample_with_boxes(static_cast<int64_t>(index)); }
  torch::optional<size_t> size() const override { return 5; }
};

TEST(BatchTensors, of_a_torch_dataset_are_those_of_its_samples) {
  const TorchDataset dataset{WithBoxes()};
  const std::vector<int64_t> indices{4, 2};
  EXPECT_TRUE(torch::equal(dataset.make_batch(indices)["boxes"].select(1, 0).select(1, 0), torch::tensor({4, 2})));
  EXPECT_EQ(dataset.make_batch({})["boxes"].sizes(), (std::vector<int64_t>{0, 2, 4}));
}

}  // namespace
}  // namespace lockstep
