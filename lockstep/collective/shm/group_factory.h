// SPDX-License-Identifier: Apache-2.0
// collective/shm/group_factory.h: the way from a Machine to the Group of all its ranks, for rendezvous.cc.
//
// Threads: any
// Ranks:   after all ranks took their seats
#pragma once

#include <chrono>
#include <memory>

#include "lockstep/collective/shm/connect/machine.h"
#include "lockstep/collective/shm/group.h"

namespace lockstep::shm {

struct GroupFactory {
  static Group make(std::shared_ptr<Machine> machine, int rank, std::chrono::milliseconds timeout);
};

}  // namespace lockstep::shm
