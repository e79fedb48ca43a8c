// data/tensor_dataset.h: samples that are rows of tensors in memory, kept in the dtype they came in.
//
// Owns:    the tensors
// Threads: const after construction
#pragma once

#include <vector>

#include "lockstep/data/dataset.h"

namespace lockstep {

class TensorDataset : public Dataset {
 public:
  // data: (N, ...), target: (N, ...), on the CPU. Throws DataError: no rows, or not as many targets as rows.
  TensorDataset(std::string name, const torch::Tensor& data, const torch::Tensor& target);

  std::string name() const override { return name_; }
  std::int64_t size() const override { return data_.size(0); }
  const torch::Tensor& data() const { return data_; }
  const torch::Tensor& target() const { return target_; }

  // Floating-point numbers and bytes become float32, other whole numbers int64; bytes in targets become int64 too.
  Batch make_batch(std::span<const std::int64_t> indices) const override { return assemble({.indices = indices}); }
  Batch assemble(const BatchRequest& request) const override;

 private:
  std::string name_;
  torch::Tensor data_;
  torch::Tensor target_;
};

// Samples [begin, end) of another dataset.
class SubsetDataset : public Dataset {
 public:
  SubsetDataset(std::shared_ptr<const Dataset> whole, std::int64_t begin, std::int64_t end);  // throws UsageError
  std::string name() const override { return whole_->name(); }
  std::int64_t size() const override { return end_ - begin_; }
  const Dataset& whole() const { return *whole_; }
  std::int64_t begin() const { return begin_; }
  Batch make_batch(std::span<const std::int64_t> indices) const override { return assemble({.indices = indices}); }
  Batch assemble(const BatchRequest& request) const override;
  void will_read(std::span<const std::int64_t> indices) const override { whole_->will_read(in_whole(indices)); }

 private:
  std::vector<std::int64_t> in_whole(std::span<const std::int64_t> indices) const;
  std::shared_ptr<const Dataset> whole_;
  std::int64_t begin_;
  std::int64_t end_;
};

}  // namespace lockstep
