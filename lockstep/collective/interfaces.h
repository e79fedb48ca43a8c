// SPDX-License-Identifier: Apache-2.0
// collective/interfaces.h: the network addresses of this machine, and which of them other machines reach.
//
// Flow:    getifaddrs(3) -> here -> rendezvous.h
// Threads: any
#pragma once

#include <string>
#include <vector>

namespace lockstep {

// As numbers, without those of the loopback interface and those that are valid on one link only. If GLOO_SOCKET_IFNAME
// names an interface, only its addresses. Throws SystemError.
std::vector<std::string> own_addresses();

// The first of own_addresses() in one network with one of `theirs`, which another machine has; "" if there is none.
// An address that both have, such as that of a bridge for containers, is in no common network.
std::string address_near(const std::vector<std::string>& theirs);

}  // namespace lockstep
