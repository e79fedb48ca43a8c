// SPDX-License-Identifier: Apache-2.0
#include "lockstep/batch.h"

#include "lockstep/base/text.h"
#include "lockstep/error.h"

namespace lockstep {
namespace {

std::string names_in(const Batch& batch) {
  std::vector<std::string> names;
  for (const auto& [name, tensor] : batch.more) names.push_back(name);
  return names.empty() ? "none" : join(names, ", ");
}

// from: the first dimension of a sample, behind those of the batch.
void require_alike(const std::string& name, const Tensor& one, const Tensor& first, size_t from) {
  if (one.defined() == first.defined() &&
      (!one.defined() || (one.dim() == first.dim() && one.sizes().slice(from) == first.sizes().slice(from))))
    return;
  throw DataError({.what = one.defined() && first.defined()
                               ? concat(name, " has sizes ", first.sizes(), " and ", one.sizes(), " in one batch")
                               : concat("some samples of a batch have no ", name),
                   .likely = "samples of different lengths",
                   .next = "pad them to one size in the dataset, and say in a further tensor what is padding"});
}

Batch joined(const std::vector<Batch>& parts, size_t from, Tensor (*join)(const torch::TensorList&)) {
  if (parts.empty()) return {};
  Batch all = parts.front();
  const auto join_each = [&](const std::string& name, Tensor& into, const auto& tensor_in) {
    std::vector<Tensor> tensors;
    for (const Batch& part : parts) {
      tensors.push_back(tensor_in(part));
      require_alike(name, tensors.back(), into, from);
    }
    if (into.defined()) into = join(tensors);
  };
  join_each("data", all.data, [](const Batch& part) { return part.data; });
  join_each("target", all.target, [](const Batch& part) { return part.target; });
  for (const Batch& part : parts) all.more.insert(part.more.begin(), part.more.end());
  for (auto& [name, tensor] : all.more)
    join_each(name, tensor, [&key = name](const Batch& part) {
      const auto found = part.more.find(key);
      return found == part.more.end() ? Tensor() : found->second;
    });
  return all;
}

}  // namespace

const Tensor& Batch::operator[](const std::string& name) const {
  const auto found = more.find(name);
  if (found != more.end()) return found->second;
  throw UsageError({.what = concat("the batch has no tensor ", name, "; it has: ", names_in(*this)),
                    .likely = "a dataset that does not put it into Batch::more, or a function that was given no batch",
                    .next = "give the dataset's batches this tensor"});
}

Batch Batch::rows(int64_t begin, int64_t end) const {
  const auto take = [&](const std::string& name, const Tensor& all) {
    if (!all.defined()) return all;
    if (all.dim() == 0 || all.size(0) != size())
      throw DataError({.what = concat(name, " has shape ", all.sizes(), " in a batch of ", size(), " samples"),
                       .next = "give it a row for each sample"});
    return all.slice(0, begin, end);
  };
  Batch part{take("data", data), take("target", target)};
  for (const auto& [name, tensor] : more) part.more[name] = take(name, tensor);
  return part;
}

Batch stacked(const std::vector<Batch>& samples) {
  return joined(samples, 0, [](const torch::TensorList& tensors) { return torch::stack(tensors); });
}

Batch concatenated(const std::vector<Batch>& batches) {
  return joined(batches, 1, [](const torch::TensorList& tensors) { return torch::cat(tensors); });
}

}  // namespace lockstep
