// SPDX-License-Identifier: Apache-2.0
#include "lockstep/collective/store/store_table.h"

#include <algorithm>

#include "lockstep/base/text.h"

namespace lockstep {
namespace {

using Kind = Packet::Kind;

Packet refused(const std::string& why) { return {Kind::kRefused, 0, {why}}; }

Packet no_room() { return refused(concat("the store is full: ", StoreTable::kMostBytes >> 20, " MiB")); }

}  // namespace

Packet StoreTable::answer(const Packet& request) {
  const auto& texts = request.texts;
  const std::size_t count = texts.size();
  switch (request.kind) {
    case Kind::kHello:
      if (count == 0) return {};
      break;
    case Kind::kSet:
      if (count > 0 && count % 2 == 0) return set(texts);
      break;
    case Kind::kGet: return get(texts);
    case Kind::kAdd:
      if (count == 1) return add(texts[0], request.number);
      break;
    case Kind::kCompareSet:
      if (count == 3) return compare_set(texts[0], texts[1], texts[2]);
      break;
    case Kind::kDelete:
      if (count == 1) return erase(texts[0]);
      break;
    case Kind::kCheck:
      return {.number = std::ranges::all_of(texts, [this](const auto& key) { return values_.contains(key); }) ? 1 : 0};
    case Kind::kCount:
      if (count == 0) return {.number = std::ssize(values_)};
      break;
    case Kind::kAppend:
      if (count == 2) return append(texts[0], texts[1]);
      break;
    default: break;
  }
  return refused("a malformed request");
}

bool StoreTable::put(const std::string& key, const std::string& value) {
  const auto found = values_.find(key);
  const std::size_t before = found == values_.end() ? 0 : found->second.size();
  const std::size_t bytes = bytes_ - before + value.size() + (found == values_.end() ? key.size() + kBytesOfKey : 0);
  if (bytes > kMostBytes) return false;
  bytes_ = bytes;
  values_[key] = value;
  return true;
}

Packet StoreTable::set(const std::vector<std::string>& pairs) {
  for (std::size_t i = 0; i < pairs.size(); i += 2)
    if (!put(pairs[i], pairs[i + 1])) return no_room();
  return {};
}

Packet StoreTable::append(const std::string& key, const std::string& value) {
  const auto found = values_.find(key);
  return set({key, found == values_.end() ? value : found->second + value});
}

Packet StoreTable::get(const std::vector<std::string>& keys) const {
  Packet answer;
  for (const std::string& key : keys) {
    const auto found = values_.find(key);
    if (found == values_.end()) return {Kind::kMissing, 0, {key}};
    answer.number += std::ssize(found->second);
    if (static_cast<std::size_t>(answer.number) > PacketStream::kLongestPacket / 2)
      return refused("more bytes at a time than the store sends");
    answer.texts.push_back(found->second);
  }
  return answer;
}

Packet StoreTable::add(const std::string& key, std::int64_t number) {
  const auto found = values_.find(key);
  std::int64_t before = 0;
  if (found != values_.end() && !parse_int(found->second, before)) return refused("adding to what is no number");
  std::int64_t sum = 0;
  if (__builtin_add_overflow(before, number, &sum)) return refused("adding beyond 64 bits");
  if (!put(key, std::to_string(sum))) return no_room();
  return {.number = sum};
}

// As c10d's stores: an expected value that is empty stands for a key that is not set.
Packet StoreTable::compare_set(const std::string& key, const std::string& expected, const std::string& wanted) {
  const auto found = values_.find(key);
  const bool matches = found == values_.end() ? expected.empty() : found->second == expected;
  if (!matches) return {.texts = {found == values_.end() ? expected : found->second}};
  if (!put(key, wanted)) return no_room();
  return {.texts = {wanted}};
}

Packet StoreTable::erase(const std::string& key) {
  const auto found = values_.find(key);
  if (found == values_.end()) return {.number = 0};
  bytes_ -= found->first.size() + found->second.size() + kBytesOfKey;
  values_.erase(found);
  return {.number = 1};
}

}  // namespace lockstep
