// SPDX-License-Identifier: Apache-2.0
// collective/shm/connect/message.h: what the ranks of a machine say to each other while they connect, over local sockets.
//
// Threads: a value
#pragma once

#include <array>
#include <cstdint>

namespace lockstep::shm {

struct Message {
  enum class Kind : std::uint32_t { kHello = 1, kWelcome, kRank, kReady, kGo };
  using enum Kind;

  std::array<char, 8> magic{'l', 'o', 'c', 'k', 's', 't', 'e', 'p'};
  std::uint32_t version = 3;
  Kind kind = Kind::kHello;
  std::int32_t rank = -1;
  std::int32_t size = 0;
  std::uint64_t layout = 0;  // bytes of the control segment: another build has another one
};

}  // namespace lockstep::shm
