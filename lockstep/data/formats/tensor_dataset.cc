// SPDX-License-Identifier: Apache-2.0
#include "lockstep/datasets.h"

#include <ATen/Dispatch.h>

#include "lockstep/base/text.h"
#include "lockstep/data/loader/batch_memory.h"
#include "lockstep/error.h"

namespace lockstep {
namespace {

template <class To>
void gather(const Tensor& rows, Indices indices, To* into) {
  const int64_t count = rows.numel() / rows.size(0);
  AT_DISPATCH_ALL_TYPES_AND3(torch::kHalf, torch::kBFloat16, torch::kBool, rows.scalar_type(), "gather", [&] {
    const auto* from = rows.const_data_ptr<scalar_t>();
    for (const int64_t index : indices) {
      for (int64_t i = 0; i < count; ++i) into[i] = static_cast<To>(from[index * count + i]);
      into += count;
    }
  });
}

Tensor gathered(const Tensor& rows, const BatchRequest& request, bool as_float) {
  std::vector<int64_t> sizes = rows.sizes().vec();
  sizes[0] = std::ssize(request.indices);
  Tensor batch = allocate_for_batch(request.memory, sizes, as_float ? torch::kFloat32 : torch::kInt64);
  if (as_float)
    gather(rows, request.indices, batch.data_ptr<float>());
  else
    gather(rows, request.indices, batch.data_ptr<int64_t>());
  return batch;
}

}  // namespace

TensorDataset::TensorDataset(std::string name, const Tensor& data, const Tensor& target, More more)
    : name_(std::move(name)), data_(data.contiguous()), target_(target.contiguous()), more_(std::move(more)) {
  if (data_.dim() < 1 || data_.size(0) < 1)
    throw DataError({.what = concat(name_, " has no samples"), .likely = "an empty file"});
  if (target_.dim() < 1 || target_.size(0) != data_.size(0))
    throw DataError(
        {.what = concat(name_, " has data of shape ", data_.sizes(), ", but targets of shape ", target_.sizes()),
         .likely = "files of different datasets"});
  static_cast<void>(Batch{data_, target_, more_}.rows(0, 0));  // throws
}

int64_t TensorDataset::classes() const {
  if (target_.dim() != 1 || !c10::isIntegralType(target_.scalar_type(), /*includeBool=*/false)) return 0;
  return std::max(target_.max().item<int64_t>() + 1, int64_t{0});
}

Batch TensorDataset::assemble(const BatchRequest& request) const {
  const bool float_data = data_.is_floating_point() || data_.scalar_type() == torch::kUInt8;
  Batch batch{gathered(data_, request, float_data), gathered(target_, request, target_.is_floating_point())};
  for (const auto& [name, rows] : more_) {
    std::vector<int64_t> sizes = rows.sizes().vec();
    sizes[0] = std::ssize(request.indices);
    Tensor& chosen = batch.more[name] = allocate_for_batch(request.memory, sizes, rows.scalar_type());
    const at::IntArrayRef indices(request.indices.data(), request.indices.size());
    torch::index_select_out(chosen, rows, 0, torch::tensor(indices, torch::kInt64));
  }
  return batch;
}

SubsetDataset::SubsetDataset(DatasetPtr whole, int64_t begin, int64_t end)
    : whole_(std::move(whole)), begin_(begin), end_(end) {
  if (begin < 0 || begin >= end || end > whole_->size())
    throw UsageError({.what = concat("samples ", begin, " to ", end, " of a dataset of ", whole_->size()),
                      .next = "give a part that is not empty"});
}

std::vector<int64_t> SubsetDataset::in_whole(Indices indices) const {
  std::vector<int64_t> places(indices.begin(), indices.end());
  for (int64_t& place : places) place += begin_;
  return places;
}

Batch SubsetDataset::assemble(const BatchRequest& request) const {
  const std::vector<int64_t> indices = in_whole(request.indices);
  BatchRequest inner = request;
  inner.indices = indices;
  return whole_->assemble(inner);
}

}  // namespace lockstep
