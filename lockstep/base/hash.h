// SPDX-License-Identifier: Apache-2.0
// base/hash.h: a number for a text, the same on every machine, unlike that of std::hash.
//
// Threads: any
#pragma once

#include <cstdint>
#include <string_view>

namespace lockstep {

// FNV-1a.
constexpr uint64_t hash_of(std::string_view text) {
  uint64_t hash = 14695981039346656037U;
  for (const char letter : text) hash = (hash ^ static_cast<unsigned char>(letter)) * 1099511628211U;
  return hash;
}

}  // namespace lockstep
