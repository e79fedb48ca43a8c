// SPDX-License-Identifier: Apache-2.0
// agent/meet/interfaces.h: the network addresses of this machine, and which of them other machines reach.
//
// Flow:    getifaddrs(3), the kernel's routes -> here -> first_machine_store.cc, collective/meet/rendezvous.h
// Threads: any
#pragma once

#include <string>
#include <vector>

namespace lockstep {

// As numbers, without those of the loopback interface and those that are valid on one link only. If GLOO_SOCKET_IFNAME
// names interfaces, only theirs. Throws SystemError.
std::vector<std::string> own_addresses();

// The first of own_addresses() in one network with one of `theirs`, which another machine has; "" if there is none.
// An address that both have, such as that of a bridge for containers, is in no common network.
std::string address_near(const std::vector<std::string>& theirs);

// Returns the address at which others probably reach a machine whose own name is one of the loopback interface (Debian's
// /etc/hosts has 127.0.1.1 for it): that of the default route, else the only one of own_addresses(); "" if there is none.
std::string address_for_others();

}  // namespace lockstep
