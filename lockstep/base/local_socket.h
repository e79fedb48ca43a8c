// SPDX-License-Identifier: Apache-2.0
// base/local_socket.h: messages with descriptors over a Unix socket, between two processes of one user on this machine.
//
// Flow:    collective/shm/connect/ and launch/keeper.h, both ends
// Threads: one per socket
#pragma once

#include <sys/socket.h>

#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include "lockstep/base/unique_fd.h"
#include "lockstep/deadline.h"

namespace lockstep {

// Addresses are paths, or names that start with '@': the kernel forgets those when nobody listens any more. Each throws
// SystemError.
UniqueFd listen_locally(const std::string& address, int type = SOCK_SEQPACKET);
UniqueFd connect_locally(const std::string& address, int type = SOCK_SEQPACKET);
UniqueFd accept_locally(int listener);  // none: nobody is waiting. Throws: no descriptors left

bool is_own_user(int socket);  // the process at the other end has this one's user

// Blocks until the other end has room, at most until the deadline. At most kMostDescriptors. False: the other end is gone,
// or did not take it in time.
inline constexpr std::size_t kMostDescriptors = 2;
bool send_with_descriptors(int socket, std::span<const std::byte> message, const std::vector<int>& descriptors,
                           Deadline deadline);

// Does not block. Bytes received: 0: the other end is gone; -1: nothing yet; more than `message` has: it was cut off.
// Appends to `descriptors`. Throws SystemError: fewer than `expected` came, because this process can have no more.
std::ptrdiff_t receive_with_descriptors(int socket, std::span<std::byte> message, std::vector<UniqueFd>& descriptors,
                                        std::size_t expected);

}  // namespace lockstep
