// SPDX-License-Identifier: Apache-2.0
// collective/shm/connect/local_socket.h: messages of fixed size with descriptors, over a Unix socket between two
// processes of one user.
//
// Flow:    rendezvous_server.cc on both sides
// Owns:    nothing: the caller owns the sockets
// Threads: one per socket
// Ranks:   both ends ask the kernel who the other is
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "lockstep/base/sockets/local_socket.h"
#include "lockstep/base/files/unique_fd.h"
#include "lockstep/deadline.h"

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

// False: the other end is gone, or did not take it before the deadline.
bool send_message(int socket, const Message& message, Deadline deadline, const std::vector<int>& descriptors = {});

enum class Received { kMessage, kNothingYet, kGarbage, kClosed };

// Does not block. kMessage only for one with the right magic, version and size, and exactly `descriptors` descriptors.
// Throws SystemError: no descriptors left to receive them with.
Received receive_message(int socket, Message& message, std::vector<UniqueFd>& descriptors, std::size_t expected);

// False: nothing came before the deadline.
bool wait_readable(int socket, Deadline deadline);

}  // namespace lockstep::shm
