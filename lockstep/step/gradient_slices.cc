// SPDX-License-Identifier: Apache-2.0
#include "lockstep/step/gradient_slices.h"

#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <utility>

#include "lockstep/base/to_size.h"
#include "lockstep/collective/gpus.h"
#include "lockstep/error.h"

namespace lockstep {

GradientSlices::GradientSlices(World world, std::vector<Bucket>& buckets, int cuts)
    : world_(std::move(world)), cuts_(cuts > 0 ? cuts : world_.size()) {
  std::vector<std::int64_t> numbers;
  for (Bucket& bucket : buckets) {
    const std::int64_t values = bucket.values.numel();
    const torch::Tensor block = torch::zeros_like(bucket.values);
    blocks_.push_back({block.view({cuts_, -1}), torch::zeros({values / world_.size()}, block.options())});
    for (Slot& slot : bucket.slots) {
      slot.move_parameter(block);
      add_parts(slot, blocks_.back(), numbers);
      parameters_.push_back(slot.parameter.tensor);
    }
  }
  numbers_ = torch::tensor(numbers, torch::kInt64).to(world_.device());
}

Range GradientSlices::own_cuts() const {
  const std::int64_t each = cuts_ / world_.size();
  return {world_.rank() * each, (world_.rank() + 1) * each};
}

// Slot and cut are ranges of one bucket; a part is where they overlap.
void GradientSlices::add_parts(const Slot& slot, const Block& block, std::vector<std::int64_t>& numbers) {
  const std::int64_t width = block.parameters.size(1), from = slot.gradient.storage_offset();
  const Range own = own_cuts();
  auto& rows = rows_[slot.parameter.tensor.unsafeGetTensorImpl()];
  rows.resize(to_size(world_.size()));
  for (std::int64_t cut = 0; cut < cuts_; ++cut) {
    const std::int64_t begin = std::max(from, cut * width);
    const std::int64_t count = std::min(from + slot.gradient.numel(), (cut + 1) * width) - begin;
    if (count <= 0) continue;
    rows[to_size(static_cast<int>(cut * world_.size() / cuts_))] += count;
    if (cut >= own.begin && cut < own.end) {
      numbers.push_back(all_parts_);
      parts_.push_back({.parameter = slot.parameter.tensor,
                        .begin = begin - from,
                        .values = block.parameters.view(-1).narrow(0, begin, count),
                        .gradient = block.gradients.narrow(0, begin - own.begin * width, count)});
    }
    ++all_parts_;
  }
}

void GradientSlices::set_used(const std::vector<torch::Tensor>& parameters) {
  used_.clear();
  for (const torch::Tensor& parameter : parameters) used_.insert(parameter.unsafeGetTensorImpl());
}

// Everyone's norms in one order, 0 where they are another rank's: sums with 0 are exact.
double GradientSlices::norm(const std::vector<torch::Tensor>& own) const {
  const torch::Tensor all = torch::zeros({all_parts_}, torch::TensorOptions(torch::kFloat64).device(world_.device()));
  if (!own.empty()) torch::Tensor(all).index_copy_(0, numbers_, torch::stack(own));
  world_.all_reduce(all);
  wait_for_device(world_);
  return all.norm().item<double>();
}

void GradientSlices::all_gather() const {
  const Range own = own_cuts();
  std::vector<Work> works;
  for (const Block& block : blocks_)
    works.push_back(world_.all_gather_async(
        block.parameters.slice(0, own.begin, own.end).view(-1),
        {.output = block.parameters.view({world_.size(), block.parameters.numel() / world_.size()})}));
  for (Work& work : works) work.wait();
  for (const torch::Tensor& parameter : parameters_)
    if (is_used(parameter)) torch::autograd::impl::bump_version(parameter);
}

torch::Tensor GradientSlices::gather(const torch::Tensor& parameter, const std::vector<torch::Tensor>& beside,
                                     torch::ScalarType dtype) const {
  std::vector<torch::Tensor> mine;
  for (std::size_t i = 0; i < parts_.size(); ++i)
    if (parts_[i].parameter.is_same(parameter)) mine.push_back(beside[i]);
  const torch::Tensor own =
      mine.empty() ? torch::empty({0}, torch::TensorOptions(dtype).device(world_.device())) : torch::cat(mine);
  const torch::Tensor all = world_.all_gather_rows(own, {.rows = rows_.at(parameter.unsafeGetTensorImpl())});
  wait_for_device(world_);
  return all.cpu().as_strided(parameter.sizes(), parameter.strides());
}

}  // namespace lockstep
