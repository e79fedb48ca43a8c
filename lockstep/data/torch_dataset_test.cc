// SPDX-License-Identifier: Apache-2.0
#include "lockstep/torch_dataset.h"

#include <gtest/gtest.h>
#include <torch/data/datasets/map.h>
#include <torch/data/transforms/stack.h>

#include "lockstep/loader.h"
#include "lockstep/world.h"

namespace lockstep {
namespace {

// Sample i is {i, i}, of class 10 i.
class Pairs : public torch::data::datasets::Dataset<Pairs> {
 public:
  torch::data::Example<> get(size_t index) override {
    const auto value = static_cast<int64_t>(index);
    return {torch::full({2}, value), torch::tensor(10 * value)};
  }
  torch::optional<size_t> size() const override { return 7; }
};

void expect_every_sample_once(Loader loader) {
  std::vector<int64_t> seen;
  for (const Batch& batch : loader.epoch(0))
    for (int64_t i = 0; i < batch.size(); ++i) {
      EXPECT_TRUE(torch::equal(batch.data[i] * 10, batch.target[i].expand({2})));
      seen.push_back(batch.data[i][0].item<int64_t>());
    }
  std::ranges::sort(seen);
  EXPECT_EQ(seen, (std::vector<int64_t>{0, 1, 2, 3, 4, 5, 6}));
}

TEST(TorchDataset, gives_the_loader_every_sample_once) {
  for (const int workers : {0, 3}) {
    const LoaderOptions options{.batch_size = 3, .workers = workers};
    expect_every_sample_once(make_loader(World::single(), TorchDataset(Pairs()), options));
    auto stacked = Pairs().map(torch::data::transforms::Stack<>());
    expect_every_sample_once(make_loader(World::single(), TorchDataset(std::move(stacked)), options));
  }
}

TEST(TorchDataset, has_batches_without_samples_of_the_same_shape) {
  const Batch none = TorchDataset(Pairs(), "pairs").make_batch({});
  EXPECT_EQ(none.data.sizes(), (std::vector<int64_t>{0, 2}));
  EXPECT_EQ(none.size(), 0);
}

}  // namespace
}  // namespace lockstep
