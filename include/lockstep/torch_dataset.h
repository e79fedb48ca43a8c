// SPDX-License-Identifier: Apache-2.0
// lockstep/torch_dataset.h: a dataset of torch::data in lockstep's loader. Included by itself.
//
//   lockstep::TorchDataset data(torch::data::datasets::MNIST("mnist").map(torch::data::transforms::Normalize<>(0.13, 0.31)));
//   auto loader = lockstep::make_loader(world, std::move(data), {.batch_size = 64});
//
// Flow:    a torch::data dataset -> here -> lockstep/loader.h
// Owns:    the dataset
// Threads: the loader's workers; get_batch() is called by one at a time
// Ranks:   as lockstep/dataset.h
#pragma once

#include <torch/data/datasets/base.h>
#include <torch/data/example.h>

#include <mutex>

#include "lockstep/dataset.h"

namespace lockstep {

// D: get_batch() returns examples of a tensor and a target, in a list or stacked, and size() is known. An example may also be
// a Batch of one sample's tensors.
template <class D>
class TorchDataset final : public Dataset {
 public:
  explicit TorchDataset(D dataset, std::string name = "torch::data")
      : state_(std::make_shared<State>(std::move(dataset))), name_(std::move(name)) {}

  std::string name() const override { return name_; }
  int64_t size() const override { return static_cast<int64_t>(state_->dataset.size().value()); }

  Batch make_batch(Indices indices) const override {
    if (indices.empty() && size() > 0) {  // of the samples' shape
      const int64_t first = 0;
      return make_batch({&first, 1}).rows(0, 0);
    }
    const std::vector<size_t> wanted(indices.begin(), indices.end());
    const std::lock_guard lock(state_->mutex);
    auto found = state_->dataset.get_batch(wanted);
    if constexpr (requires { found.target; }) {
      return batch_of(found);
    } else {
      std::vector<Batch> samples;
      for (const auto& example : found) samples.push_back(batch_of(example));
      return stacked(samples);
    }
  }

 private:
  static Batch batch_of(const Batch& batch) { return batch; }
  template <class Example>
  static Batch batch_of(const Example& example) {
    return {example.data, example.target};
  }

  struct State {
    explicit State(D given) : dataset(std::move(given)) {}
    std::mutex mutex;
    D dataset;  // get_batch() is not const
  };
  std::shared_ptr<State> state_;
  std::string name_;
};

}  // namespace lockstep
