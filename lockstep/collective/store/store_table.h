// SPDX-License-Identifier: Apache-2.0
// collective/store/store_table.h: the keys and values of a store, and what each request does to them.
//
// Flow:    store_server.h -> here
// Owns:    keys and values, of which there are never more bytes than kMostBytes
// Threads: one at a time
#pragma once

#include <map>
#include <string>

#include "lockstep/collective/store/packet_stream.h"

namespace lockstep {

class StoreTable {
 public:
  static constexpr std::size_t kMostBytes = std::size_t{128} << 20;
  static constexpr std::size_t kBytesOfKey = 128;  // what a key costs beside its own bytes and its value's

  // kRefused says why in its text; then nothing has changed.
  Packet answer(const Packet& request);

  std::size_t bytes() const { return bytes_; }

 private:
  Packet set(const std::vector<std::string>& pairs);  // key, value, key, value, …
  Packet append(const std::string& key, const std::string& value);
  Packet get(const std::vector<std::string>& keys) const;
  Packet add(const std::string& key, std::int64_t number);
  Packet compare_set(const std::string& key, const std::string& expected, const std::string& wanted);
  Packet erase(const std::string& key);
  bool put(const std::string& key, const std::string& value);  // false: no room

  std::map<std::string, std::string> values_;
  std::size_t bytes_ = 0;
};

}  // namespace lockstep
