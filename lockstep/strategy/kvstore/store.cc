// SPDX-License-Identifier: Apache-2.0
#include "lockstep/strategy/kvstore/store.h"

#include <span>

#include "lockstep/base/text.h"
#include "lockstep/error.h"

namespace lockstep {
namespace {

Key key_of(const NamedTensor& value, bool trained) {
  return {.name = value.name,
          .elements = value.tensor.numel(),
          .rows = value.tensor.dim() > 0 && value.tensor.numel() > 0 ? value.tensor.size(0) : 1,
          .sizes = value.tensor.sizes().vec(),
          .dtype = value.tensor.scalar_type(),
          .trained = trained};
}

void require_rows(const Key& key, const torch::Tensor& rows) {
  const bool good =
      rows.scalar_type() == torch::kInt64 && rows.dim() == 1 &&
      (rows.numel() == 0 || (rows.min().item<std::int64_t>() >= 0 && rows.max().item<std::int64_t>() < key.rows));
  if (good) return;
  throw UsageError({.what = concat("rows of ", key.name, " that it does not have"),
                    .next = concat("give int64 numbers from 0 to ", key.rows - 1)});
}

}  // namespace

void Store::init(const std::vector<NamedTensor>& values, const std::vector<NamedTensor>& buffers) {
  if (!keys_.empty())
    throw UsageError({.what = "init() of a store that has its keys", .next = "give all keys at once"});
  std::vector<torch::Tensor> tensors;
  const auto add = [&](const NamedTensor& value, bool trained) {
    if (!numbers_.emplace(value.name, keys_.size()).second)
      throw UsageError({.what = concat("two values for the key ", value.name)});
    keys_.push_back(key_of(value, trained));
    tensors.push_back(value.tensor.detach());
  };
  for (const NamedTensor& value : values) add(value, true);
  for (const NamedTensor& buffer : buffers) add(buffer, false);
  create(tensors);
}

std::size_t Store::number_of(const std::string& name) const {
  if (const auto found = numbers_.find(name); found != numbers_.end()) return found->second;
  throw UsageError({.what = concat("the store has no key ", name), .next = "give init() every key"});
}

// Calls `call` for each run of names whose keys are neighbours, with a function that cuts the run out of DeviceTensors.
template <class Call>
void Store::for_each_run(const Names& names, const Call& call) const {
  std::vector<std::size_t> numbers;
  for (const std::string& name : names) numbers.push_back(number_of(name));
  for (std::size_t first = 0, last = 0; first < numbers.size(); first = last) {
    for (last = first + 1; last < numbers.size() && numbers[last] == numbers[last - 1] + 1;) ++last;
    call(KeyRange{numbers[first], numbers[last - 1] + 1}, [first, last](const DeviceTensors& tensors) {
      DeviceTensors run;
      for (const auto& device : tensors) {
        const auto keys = std::span(device).subspan(first, last - first);
        run.emplace_back(keys.begin(), keys.end());
      }
      return run;
    });
  }
}

void Store::push(const Names& names, const DeviceTensors& values, const PushOptions& options) {
  for_each_run(names, [&](KeyRange keys, const auto& run_of) { push(keys, run_of(values), options); });
}

void Store::pull(const Names& names, const DeviceTensors& into) {
  for_each_run(names, [&](KeyRange keys, const auto& run_of) { pull(keys, run_of(into)); });
}

void Store::push_pull(const Names& names, const DeviceTensors& values, const DeviceTensors& into,
                      const PushOptions& options) {
  for_each_run(names,
               [&](KeyRange keys, const auto& run_of) { push_pull(keys, run_of(values), run_of(into), options); });
}

void Store::push_pull(KeyRange keys, const DeviceTensors& values, const DeviceTensors& into,
                      const PushOptions& options) {
  push(keys, values, options);
  pull(keys, into);
}

torch::Tensor Store::row_sparse_pull(const std::string& name, const torch::Tensor& rows) {
  const std::size_t key = number_of(name);
  require_rows(keys_[key], rows);
  std::vector<std::int64_t> sizes = keys_[key].sizes;
  if (sizes.empty()) sizes.resize(1);
  sizes.front() = rows.numel();
  return pull_rows(key, rows).reshape(sizes);
}

}  // namespace lockstep
