// SPDX-License-Identifier: Apache-2.0
// agent/meet/store_table.h: the keys and values of a store, and what each request does to them.
//
// Flow:    store_server.h -> here
// Owns:    keys and values, of which there are never more bytes than kMostBytes
// Threads: one at a time
#pragma once

#include <map>
#include <string>

#include "agent/meet/packet_stream.h"

namespace lockstep {

class StoreTable {
 public:
  static constexpr size_t kMostBytes = size_t{128} << 20;
  static constexpr int kNobody = 0;
  static constexpr size_t kBytesOfKey = 128;  // what a key costs beside its own bytes and its value's

  // kRefused says why in its text; then nothing has changed. `owner`: the connection that asks.
  Packet answer(const Packet& request, int owner);
  void erase_keys_of(int owner);

 private:
  Packet set(const std::vector<std::string>& pairs);  // key, value, key, value, …
  Packet append(const std::string& key, const std::string& value);
  Packet get(const std::vector<std::string>& keys) const;
  Packet add(const std::string& key, int64_t number);
  Packet compare_set(const std::string& key, const std::string& expected, const std::string& wanted);
  Packet erase(const std::string& key);
  Packet list(const std::string& prefix) const;  // key, value, number of its creation, …
  bool put(const std::string& key, const std::string& value, int owner = kNobody);  // false: no room

  struct Entry {
    std::string value;
    int64_t created;  // the how manieth key
    int owner;
  };
  std::map<std::string, Entry> entries_;
  int64_t created_ = 0;
  size_t bytes_ = 0;
};

}  // namespace lockstep
