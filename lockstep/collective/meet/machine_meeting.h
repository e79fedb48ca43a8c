// SPDX-License-Identifier: Apache-2.0
// collective/meet/machine_meeting.h: how the ranks of a job that is on one machine find each other: at a Unix socket, without TCP.
//
// Flow:    rendezvous.cc -> here -> store_client.h
// Owns:    a socket without a file, until all ranks have connected
// Threads: call from one thread
// Ranks:   every rank calls it once
#pragma once

#include "agent/clusters/environment.h"
#include "lockstep/collective/meet/store_ptr.h"
#include "lockstep/deadline.h"

namespace lockstep {

// Tells whether all ranks of `job` are on this machine, by what its launcher says.
bool is_on_one_machine(const JobEnvironment& job);

// Blocks until rank 0 answers; rank 0 until all have connected. Each end asks the kernel who the other is. Throws
// RendezvousError: the deadline, or another job's rank 0 with the same MASTER_ADDR and MASTER_PORT; SystemError.
StorePtr meet_on_machine(const JobEnvironment& job, milliseconds timeout);

}  // namespace lockstep
