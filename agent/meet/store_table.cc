// SPDX-License-Identifier: Apache-2.0
#include "agent/meet/store_table.h"

#include <algorithm>

#include "lockstep/base/text.h"

namespace lockstep {
namespace {

Packet refused(const std::string& why) { return {Packet::Kind::kRefused, 0, {why}}; }

Packet no_room() { return refused(concat("the store is full: ", StoreTable::kMostBytes >> 20, " MiB")); }

}  // namespace

Packet StoreTable::answer(const Packet& request, int owner) {
  using enum Packet::Kind;
  const auto& texts = request.texts;
  const auto is = [&](Packet::Kind kind, size_t count) { return request.kind == kind && texts.size() == count; };
  if (is(kHello, 0)) return {};
  if (request.kind == kSet && !texts.empty() && texts.size() % 2 == 0) return set(texts);
  if (request.kind == kGet) return get(texts);
  if (is(kAdd, 1)) return add(texts[0], request.number);
  if (is(kCompareSet, 3)) return compare_set(texts[0], texts[1], texts[2]);
  if (is(kDelete, 1)) return erase(texts[0]);
  if (request.kind == kCheck)
    return {.number = std::ranges::all_of(texts, [this](const auto& key) { return entries_.contains(key); }) ? 1 : 0};
  if (is(kCount, 0)) return {.number = std::ssize(entries_)};
  if (is(kAppend, 2)) return append(texts[0], texts[1]);
  if (is(kSetOwn, 2)) return put(texts[0], texts[1], owner) ? Packet{} : no_room();
  if (is(kList, 1)) return list(texts[0]);
  return refused("a malformed request");
}

bool StoreTable::put(const std::string& key, const std::string& value, int owner) {
  const auto found = entries_.find(key);
  const bool is_new = found == entries_.end();
  const size_t before = is_new ? 0 : found->second.value.size();
  const size_t bytes = bytes_ - before + value.size() + (is_new ? key.size() + kBytesOfKey : 0);
  if (bytes > kMostBytes) return false;
  bytes_ = bytes;
  entries_[key] = {value, is_new ? ++created_ : found->second.created, owner};
  return true;
}

void StoreTable::erase_keys_of(int owner) {
  std::vector<std::string> own;
  for (const auto& [key, entry] : entries_)
    if (entry.owner == owner) own.push_back(key);
  for (const std::string& key : own) erase(key);
}

Packet StoreTable::list(const std::string& prefix) const {
  Packet answer;
  for (auto entry = entries_.lower_bound(prefix); entry != entries_.end() && entry->first.starts_with(prefix); ++entry)
    answer.texts.insert(answer.texts.end(), {entry->first, entry->second.value, std::to_string(entry->second.created)});
  return answer;
}

Packet StoreTable::set(const std::vector<std::string>& pairs) {
  for (size_t i = 0; i < pairs.size(); i += 2)
    if (!put(pairs[i], pairs[i + 1])) return no_room();
  return {};
}

Packet StoreTable::append(const std::string& key, const std::string& value) {
  const auto found = entries_.find(key);
  return set({key, found == entries_.end() ? value : found->second.value + value});
}

Packet StoreTable::get(const std::vector<std::string>& keys) const {
  Packet answer;
  for (const std::string& key : keys) {
    const auto found = entries_.find(key);
    if (found == entries_.end()) return {Packet::Kind::kMissing, 0, {key}};
    answer.number += std::ssize(found->second.value);
    if (static_cast<size_t>(answer.number) > PacketStream::kLongestPacket / 2)
      return refused("more bytes at a time than the store sends");
    answer.texts.push_back(found->second.value);
  }
  return answer;
}

Packet StoreTable::add(const std::string& key, int64_t number) {
  const auto found = entries_.find(key);
  int64_t before = 0;
  if (found != entries_.end() && !parse_int(found->second.value, before))
    return refused("adding to something that is not a number");
  int64_t sum = 0;
  if (__builtin_add_overflow(before, number, &sum)) return refused("adding beyond 64 bits");
  if (!put(key, std::to_string(sum))) return no_room();
  return {.number = sum};
}

// As c10d's stores: an expected value that is empty stands for a key that is not set.
Packet StoreTable::compare_set(const std::string& key, const std::string& expected, const std::string& wanted) {
  const auto found = entries_.find(key);
  const bool matches = found == entries_.end() ? expected.empty() : found->second.value == expected;
  if (!matches) return {.texts = {found == entries_.end() ? expected : found->second.value}};
  if (!put(key, wanted)) return no_room();
  return {.texts = {wanted}};
}

Packet StoreTable::erase(const std::string& key) {
  const auto found = entries_.find(key);
  if (found == entries_.end()) return {.number = 0};
  bytes_ -= found->first.size() + found->second.value.size() + kBytesOfKey;
  entries_.erase(found);
  return {.number = 1};
}

}  // namespace lockstep
