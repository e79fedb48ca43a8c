// SPDX-License-Identifier: Apache-2.0
// agent/recover/keeper_message.h: what a rank and the keeper of its launcher say to each other, over a local socket.
//
//   rank -> keeper   kKeep      name, generation; with it the descriptor of memory
//                    kComplete  generation: its memory holds all state, so what is older may go
//                    kFetch     generation. keeper -> rank: kKept for each descriptor of the newest complete generation
//                               before it, then kNoMore
//                    kMet       generation: this rank has met the others
//                    kNext      generation: this rank has lost another one. keeper -> rank, once there is a newer
//                               generation: kGeneration, with the rank's variables
#pragma once

#include <array>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "lockstep/base/sockets/local_socket.h"

namespace lockstep {

struct KeeperMessage {
  enum class Kind : std::uint32_t { kKeep = 1, kComplete, kFetch, kKept, kNoMore, kMet, kNext, kGeneration };
  using enum Kind;

  std::array<char, 8> magic{'l', 's', 'k', 'e', 'e', 'p', 'e', 'r'};
  std::uint32_t version = 1;
  Kind kind = Kind::kKeep;
  std::int32_t generation = 0;
  std::int32_t seat = -1;         // which of the launcher's processes; stays the same when ranks are numbered anew
  std::int32_t local_rank = -1;   // in its generation
  std::array<char, 1024> text{};  // zero-terminated: a name, or NAME=VALUE lines

  void set_text(std::string_view value) {
    text = {};
    value.copy(text.data(), text.size() - 1);
  }
  std::string get_text() const { return {text.data(), ::strnlen(text.data(), text.size())}; }
};

using Variables = std::vector<std::pair<std::string, std::string>>;  // of the environment

}  // namespace lockstep
