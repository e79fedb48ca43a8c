// SPDX-License-Identifier: Apache-2.0
#include "lockstep/collective/shm/connect/local_socket.h"

#include <span>

#include "lockstep/base/sockets/poll.h"

namespace lockstep::shm {
namespace {

bool well_formed(const Message& message, ssize_t bytes) {
  const Message expected;
  return bytes == static_cast<ssize_t>(sizeof message) && message.magic == expected.magic &&
         message.version == expected.version;
}

}  // namespace

bool send_message(int socket, const Message& message, Deadline deadline, const std::vector<int>& descriptors) {
  return send_with_descriptors(socket, std::as_bytes(std::span(&message, 1)), descriptors, deadline);
}

Received receive_message(int socket, Message& message, std::vector<UniqueFd>& descriptors, std::size_t expected) {
  const auto bytes = receive_with_descriptors(socket, std::as_writable_bytes(std::span(&message, 1)), descriptors, expected);
  if (bytes < 0) return Received::kNothingYet;
  if (bytes == 0) return Received::kClosed;
  return well_formed(message, bytes) && descriptors.size() == expected ? Received::kMessage : Received::kGarbage;
}

bool wait_readable(int socket, Deadline deadline) { return wait_for(POLLIN, socket, deadline); }

}  // namespace lockstep::shm
