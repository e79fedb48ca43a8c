// SPDX-License-Identifier: Apache-2.0
// checkpoint/hash.h: XXH3 (64 bits) of bytes that come in parts. Against accidents, not against attackers.
//
// Threads: one at a time
#pragma once

#include <xxhash.h>

#include <cstddef>
#include <iomanip>
#include <memory>
#include <string>

#include "lockstep/base/text.h"

namespace lockstep {

class Hash {
 public:
  Hash() : state_(XXH3_createState()) { XXH3_64bits_reset(state_.get()); }
  void add(const void* data, std::size_t bytes) { XXH3_64bits_update(state_.get(), data, bytes); }
  std::string digits() const {  // 16
    return concat(std::hex, std::setfill('0'), std::setw(16), XXH3_64bits_digest(state_.get()));
  }

 private:
  struct Frees {
    void operator()(XXH3_state_t* state) const { XXH3_freeState(state); }
  };
  std::unique_ptr<XXH3_state_t, Frees> state_;
};

}  // namespace lockstep
