// SPDX-License-Identifier: Apache-2.0
#include "lockstep/collective/meet/store_client.h"

#include <algorithm>

#include <c10/util/Exception.h>

#include "lockstep/base/retry.h"
#include "lockstep/base/text.h"

namespace lockstep {
namespace {

using Kind = Packet::Kind;
using Bytes = MeetingStore::Bytes;

constexpr milliseconds kLongestPauseOfWait{20};
constexpr milliseconds kLeastPatience{30'000};  // for one answer, however short a wait for a key is

std::string text_of(const Bytes& bytes) { return {bytes.begin(), bytes.end()}; }
Bytes bytes_of(const std::string& text) { return {text.begin(), text.end()}; }

}  // namespace

Packet MeetingStore::ask(const Packet& request) {
  auto answer = client_->ask(request, Deadline::after(std::max(getTimeout(), kLeastPatience)));
  if (!answer) C10_THROW_ERROR(DistNetworkError, "the store in rank 0 does not answer: rank 0 has ended, or hangs");
  if (answer->kind == Kind::kRefused)
    C10_THROW_ERROR(DistStoreError, concat("the store in rank 0 refused a request: ", join(answer->texts, " ")));
  return std::move(*answer);
}

StorePtr MeetingStore::clone() { return c10::make_intrusive<MeetingStore>(client_, getTimeout()); }

void MeetingStore::set(const std::string& key, const Bytes& value) {
  ask({.kind = Kind::kSet, .texts = {key, text_of(value)}});
}

Bytes MeetingStore::compareSet(const std::string& key, const Bytes& expected, const Bytes& wanted) {
  const Packet answer = ask({.kind = Kind::kCompareSet, .texts = {key, text_of(expected), text_of(wanted)}});
  if (answer.texts.size() != 1) C10_THROW_ERROR(DistStoreError, concat("the store in rank 0 gave no value of ", key));
  return bytes_of(answer.texts.front());
}

Bytes MeetingStore::get(const std::string& key) { return multiGet({key}).at(0); }

int64_t MeetingStore::add(const std::string& key, int64_t value) {
  return ask({.kind = Kind::kAdd, .number = value, .texts = {key}}).number;
}

bool MeetingStore::deleteKey(const std::string& key) {
  return ask({.kind = Kind::kDelete, .texts = {key}}).number == 1;
}

bool MeetingStore::check(const std::vector<std::string>& keys) {
  return ask({.kind = Kind::kCheck, .texts = keys}).number == 1;
}

int64_t MeetingStore::getNumKeys() { return ask({.kind = Kind::kCount}).number; }

void MeetingStore::wait(const std::vector<std::string>& keys, const milliseconds& timeout) {
  if (!retry(Deadline::after(timeout), kLongestPauseOfWait, [&] { return check(keys); }))
    C10_THROW_ERROR(DistStoreError, concat("wait timeout after ", timeout.count(), "ms, keys: ", join(keys, ", ")));
}

void MeetingStore::append(const std::string& key, const Bytes& value) {
  ask({.kind = Kind::kAppend, .texts = {key, text_of(value)}});
}

std::vector<Bytes> MeetingStore::multiGet(const std::vector<std::string>& keys) {
  wait(keys);
  const Packet answer = ask({.kind = Kind::kGet, .texts = keys});
  if (answer.texts.size() != keys.size() || answer.kind == Kind::kMissing)
    C10_THROW_ERROR(DistStoreError, concat("a key was deleted meanwhile: ", join(keys, ", ")));
  std::vector<Bytes> values;
  for (const std::string& text : answer.texts) values.push_back(bytes_of(text));
  return values;
}

void MeetingStore::multiSet(const std::vector<std::string>& keys, const std::vector<Bytes>& values) {
  TORCH_CHECK(keys.size() == values.size(), "multiSet: ", keys.size(), " keys and ", values.size(), " values");
  Packet request{.kind = Kind::kSet};
  for (size_t i = 0; i < keys.size(); ++i) request.texts.insert(request.texts.end(), {keys[i], text_of(values[i])});
  ask(request);
}

}  // namespace lockstep
