#include "lockstep/kvstore.h"

#include <set>

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

DeviceTensors slice_of(const DeviceTensors& tensors, std::size_t first, std::size_t last) {
  DeviceTensors part;
  for (const auto& device : tensors)
    part.emplace_back(device.begin() + static_cast<std::ptrdiff_t>(first),
                      device.begin() + static_cast<std::ptrdiff_t>(last));
  return part;
}

// Calls `call` for each run of numbers that follow each other, with its place in `numbers`.
template <class Call>
void for_each_run(const std::vector<std::int64_t>& numbers, const Call& call) {
  for (std::size_t first = 0; first < numbers.size();) {
    std::size_t last = first + 1;
    while (last < numbers.size() && numbers[last] == numbers[last - 1] + 1) ++last;
    call(KeyRange{numbers[first], numbers[last - 1] + 1}, first, last);
    first = last;
  }
}

}  // namespace

void KVStore::init(const std::vector<NamedTensor>& values, const std::vector<NamedTensor>& plain) {
  if (!keys_.empty())
    throw UsageError({.what = "init() of a store that has its keys", .next = "give all keys at once"});
  std::set<std::string> names;
  std::vector<torch::Tensor> tensors;
  const auto add = [&](const NamedTensor& value, bool trained) {
    if (!names.insert(value.name).second) throw UsageError({.what = concat("two values for the key ", value.name)});
    keys_.push_back(key_of(value, trained));
    like_.push_back(torch::empty_like(value.tensor.detach()));
    tensors.push_back(value.tensor.detach());
  };
  for (const NamedTensor& value : values) add(value, true);
  for (const NamedTensor& value : plain) add(value, false);
  create(tensors);
}

std::int64_t KVStore::number_of(const std::string& name) const {
  for (std::size_t i = 0; i < keys_.size(); ++i)
    if (keys_[i].name == name) return static_cast<std::int64_t>(i);
  throw UsageError({.what = concat("the store has no key ", name), .next = "give init() every key"});
}

void KVStore::push(const std::vector<std::string>& names, const DeviceTensors& values, const PushOptions& options) {
  std::vector<std::int64_t> numbers;
  for (const std::string& name : names) numbers.push_back(number_of(name));
  for_each_run(numbers, [&](KeyRange keys, std::size_t first, std::size_t last) {
    push(keys, slice_of(values, first, last), options);
  });
}

void KVStore::pull(const std::vector<std::string>& names, const DeviceTensors& into) {
  std::vector<std::int64_t> numbers;
  for (const std::string& name : names) numbers.push_back(number_of(name));
  for_each_run(numbers,
               [&](KeyRange keys, std::size_t first, std::size_t last) { pull(keys, slice_of(into, first, last)); });
}

void KVStore::push_pull(const std::vector<std::string>& names, const DeviceTensors& values, const DeviceTensors& into,
                        const PushOptions& options) {
  std::vector<std::int64_t> numbers;
  for (const std::string& name : names) numbers.push_back(number_of(name));
  for_each_run(numbers, [&](KeyRange keys, std::size_t first, std::size_t last) {
    push_pull(keys, slice_of(values, first, last), slice_of(into, first, last), options);
  });
}

void KVStore::push_pull(KeyRange keys, const DeviceTensors& values, const DeviceTensors& into,
                        const PushOptions& options) {
  push(keys, values, options);
  pull(keys, into);
}

void require_rows(const Key& key, const torch::Tensor& rows) {
  const bool good =
      rows.scalar_type() == torch::kInt64 && rows.dim() == 1 &&
      (rows.numel() == 0 || (rows.min().item<std::int64_t>() >= 0 && rows.max().item<std::int64_t>() < key.rows));
  if (good) return;
  throw UsageError({.what = concat("rows of ", key.name, " that it does not have"),
                    .next = concat("give int64 numbers from 0 to ", key.rows - 1)});
}

}  // namespace lockstep
