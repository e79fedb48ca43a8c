// SPDX-License-Identifier: Apache-2.0
#include "lockstep/strategy/kvstore/store.h"

#include <set>
#include <span>

#include "lockstep/base/text.h"
#include "lockstep/error.h"

namespace lockstep {
namespace {

Key key_of(const NamedTensor& value, bool trained) {
  return {.name = value.name,
          .elements = value.tensor.numel(),
          .rows = value.tensor.dim() > 0 && value.tensor.numel() > 0 ? value.tensor.size(0) : 1,
          .dtype = value.tensor.scalar_type(),
          .trained = trained};
}

DeviceTensors keys_between(const DeviceTensors& tensors, std::size_t first, std::size_t last) {
  DeviceTensors part;
  for (const auto& device : tensors) {
    const std::span<const torch::Tensor> keys = std::span(device).subspan(first, last - first);
    part.emplace_back(keys.begin(), keys.end());
  }
  return part;
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
  std::set<std::string> names;
  std::vector<torch::Tensor> tensors;
  const auto add = [&](const NamedTensor& value, bool trained) {
    if (!names.insert(value.name).second) throw UsageError({.what = concat("two values for the key ", value.name)});
    keys_.push_back(key_of(value, trained));
    sizes_.push_back(value.tensor.sizes().vec());
    tensors.push_back(value.tensor.detach());
  };
  for (const NamedTensor& value : values) add(value, true);
  for (const NamedTensor& buffer : buffers) add(buffer, false);
  create(tensors);
}

std::size_t Store::number_of(const std::string& name) const {
  for (std::size_t i = 0; i < keys_.size(); ++i)
    if (keys_[i].name == name) return i;
  throw UsageError({.what = concat("the store has no key ", name), .next = "give init() every key"});
}

// Calls `call` for each run of names whose keys are neighbours, with the run's place [first, last) in `names`.
template <class Call>
void Store::for_each_run(const Names& names, const Call& call) const {
  std::vector<std::size_t> numbers;
  for (const std::string& name : names) numbers.push_back(number_of(name));
  for (std::size_t first = 0; first < numbers.size();) {
    std::size_t last = first + 1;
    while (last < numbers.size() && numbers[last] == numbers[last - 1] + 1) ++last;
    call(KeyRange{numbers[first], numbers[last - 1] + 1}, first, last);
    first = last;
  }
}

void Store::push(const Names& names, const DeviceTensors& values, const PushOptions& options) {
  for_each_run(names, [&](KeyRange keys, std::size_t first, std::size_t last) {
    push(keys, keys_between(values, first, last), options);
  });
}

void Store::pull(const Names& names, const DeviceTensors& into) {
  for_each_run(
      names, [&](KeyRange keys, std::size_t first, std::size_t last) { pull(keys, keys_between(into, first, last)); });
}

void Store::push_pull(const Names& names, const DeviceTensors& values, const DeviceTensors& into,
                      const PushOptions& options) {
  for_each_run(names, [&](KeyRange keys, std::size_t first, std::size_t last) {
    push_pull(keys, keys_between(values, first, last), keys_between(into, first, last), options);
  });
}

void Store::push_pull(KeyRange keys, const DeviceTensors& values, const DeviceTensors& into,
                      const PushOptions& options) {
  push(keys, values, options);
  pull(keys, into);
}

torch::Tensor Store::row_sparse_pull(const std::string& name, const torch::Tensor& rows) {
  const std::size_t key = number_of(name);
  require_rows(keys_[key], rows);
  std::vector<std::int64_t> sizes = sizes_[key];
  if (sizes.empty()) sizes.resize(1);
  sizes.front() = rows.numel();
  return pull_rows(key, rows).reshape(sizes);
}

}  // namespace lockstep
