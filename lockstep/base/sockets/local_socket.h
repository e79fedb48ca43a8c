// SPDX-License-Identifier: Apache-2.0
// base/sockets/local_socket.h: messages with descriptors over a Unix socket, between two processes of one user on this machine.
//
// Flow:    collective/shm/connect/ and agent/recover/keeper.h, both ends
// Threads: one per socket
#pragma once

#include <sys/socket.h>

#include <array>
#include <cstddef>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "lockstep/base/files/unique_fd.h"
#include "lockstep/deadline.h"

namespace lockstep {

// Addresses are names that start with '@', which need no file system and which the kernel forgets when nobody listens any
// more; or paths. Each throws SystemError.
UniqueFd listen_locally(const std::string& address, int type = SOCK_SEQPACKET);
UniqueFd connect_locally(const std::string& address, int type = SOCK_SEQPACKET,
                         Deadline deadline = Deadline::after({}));  // until then waits for room where many connect

std::array<UniqueFd, 2> connected_pair(int type = SOCK_STREAM);  // two ends, which exec closes

std::string new_local_address(const std::string& prefix);  // which nobody can guess, and listen there first
// The names with this prefix at which processes of any user listen; none where the system does not list them.
std::vector<std::string> local_listeners(const std::string& prefix);

UniqueFd accept_locally(int listener);  // none: nobody is waiting. Throws: no descriptors left

// Gives this process as many descriptors as it may have without privileges, up to 65,536: each group of N ranks takes 2 N.
void raise_descriptor_limit();

// The process at the other end. Nothing: this is no socket.
std::optional<ucred> peer_of(int socket);
bool is_own_user(int socket);  // it has this process's user

// Blocks until the other end has room, at most until the deadline. At most kMostDescriptors. False: the other end is gone,
// or did not take it in time.
inline constexpr size_t kMostDescriptors = 2;
bool send_with_descriptors(int socket, std::span<const std::byte> message, const std::vector<int>& descriptors,
                           Deadline deadline);

// Does not block. Bytes received: 0: the other end is gone; -1: nothing yet; more than `message` has: it was cut off.
// Appends to `descriptors`. Throws SystemError: fewer than `expected` came, because this process can have no more.
ptrdiff_t receive_with_descriptors(int socket, std::span<std::byte> message, std::vector<UniqueFd>& descriptors,
                                   size_t expected);

}  // namespace lockstep
