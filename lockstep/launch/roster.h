// SPDX-License-Identifier: Apache-2.0
// launch/roster.h: what a launcher takes along from the meeting, to stay connected to the others.
//
// Flow:    node_meeting.h -> here -> machines.h
// Owns:    the socket where others reach this launcher, and ports that it keeps free for rank 0
// Threads: one at a time
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "lockstep/base/files/unique_fd.h"
#include "lockstep/base/sockets/port.h"
#include "lockstep/launch/epoch.h"
#include "lockstep/launch/job_secret.h"

namespace lockstep {

struct Roster {
  Member me{};
  Epoch epoch{};
  std::string job{};            // a number that no other job has
  std::string greeting{};       // what a new machine says first, before its member
  SecretPtr secret{};           // gives the secret to new machines
  std::optional<Secret> key{};  // none: --insecure-network
  UniqueFd listener{};
  std::vector<ReservedPort> ports{};  // me.master_ports, while they are kept free
};

}  // namespace lockstep
