// SPDX-License-Identifier: Apache-2.0
// collective/meet/rendezvous.h: how the ranks of a job find each other: a c10d store that all of them can reach.
//
// Flow:    agent/clusters/environment.h -> here -> the transports (transport.h)
// Owns:    rank 0's store lives in rank 0's process; the others hold a connection to it
// Threads: call from one thread
// Ranks:   every rank calls connect_store once
#pragma once

#include <string>

#include "agent/clusters/environment.h"
#include "lockstep/collective/meet/store_ptr.h"
#include "lockstep/collective_types.h"
#include "lockstep/deadline.h"

namespace lockstep {

// docs/design/rendezvous.md says where ranks meet. A name that does not resolve yet is tried again. Blocks until rank 0
// answers. Throws RendezvousError: port in use, another job's rank 0 at this port, no answer from the resolver or rank 0
// before the timeout.
StorePtr connect_store(const JobEnvironment& job, milliseconds timeout);

// As connect_store() of ranks that no launcher has told where to meet.
StorePtr connect_store(const JobEnvironment& job, const ExchangeTexts& exchange, milliseconds timeout);

// At MASTER_ADDR, where rank 0 listens at that address only. With several ports to try (job.master_ports) it takes the
// first free one, and the others look for their own job. As connect_store.
StorePtr connect_at_address(const JobEnvironment& job, milliseconds timeout);

// As connect_store, for a process group of torch.distributed, apart from World's own meeting: the store stays for the
// group's life. Rank 0 blocks until all have come, and does not listen any more then.
StorePtr connect_process_group(JobEnvironment job, milliseconds timeout);

// Once all ranks have connected: rank 0 does not listen any more.
void let_nobody_else_in(c10d::Store& store);

// The address of this machine's interface that routes to `host`: what is there can reach this machine at it.
// Throws RendezvousError: the name does not resolve before the timeout; SystemError: no route.
std::string address_towards(const std::string& host, milliseconds timeout);

// The same towards the host of a TCPStore. Of another store: the address that this machine's own name has, else that of
// the loopback interface.
std::string address_towards_store(c10d::Store& store, milliseconds timeout);

}  // namespace lockstep
