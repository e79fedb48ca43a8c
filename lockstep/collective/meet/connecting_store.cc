// SPDX-License-Identifier: Apache-2.0
#include "lockstep/collective/meet/connecting_store.h"

#include "lockstep/base/retry.h"
#include "lockstep/base/text.h"
#include "lockstep/error.h"

namespace lockstep {
namespace {

constexpr milliseconds kLongestPause{50};  // of a rank that waits for another: between two looks
constexpr const char* kFailure = "failure";

std::string keys_of_next_connection(c10d::Store& store, int rank) {
  return concat("lockstep/connection/", store.add(concat("lockstep/connections/", rank), 1));
}

}  // namespace

ConnectingStore::ConnectingStore(const StorePtr& store, int rank)
    : PrefixStore(keys_of_next_connection(*store, rank), store) {}

void ConnectingStore::fail(const std::string& here, const std::string& what) try {
  if (PrefixStore::check({kFailure})) return;  // of the rank that failed first
  Store::set(kFailure, concat(here, " could not connect: ", what));
} catch (const std::exception&) {  // the store is gone, which the others notice
}

void ConnectingStore::require_no_failure() {
  if (!PrefixStore::check({kFailure})) return;
  const auto text = PrefixStore::get(kFailure);
  throw RendezvousError(
      {.what = {text.begin(), text.end()}, .likely = "a fault on that rank's machine", .next = "look at its output"});
}

// By check(), since c10d would log a warning for each short wait() without an answer.
void ConnectingStore::wait(const std::vector<std::string>& keys, const milliseconds& timeout) {
  const auto are_there = [&] {
    const bool found = PrefixStore::check(keys);
    if (!found) require_no_failure();
    return found;
  };
  if (!retry(Deadline::after(timeout), kLongestPause, are_there))
    PrefixStore::wait(keys, milliseconds(1));  // its error
}

std::vector<uint8_t> ConnectingStore::get(const std::string& key) {
  wait({key});
  return PrefixStore::get(key);
}

std::vector<std::vector<uint8_t>> ConnectingStore::multiGet(const std::vector<std::string>& keys) {
  wait(keys);
  return PrefixStore::multiGet(keys);
}

}  // namespace lockstep
