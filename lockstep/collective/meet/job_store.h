// SPDX-License-Identifier: Apache-2.0
// collective/meet/job_store.h: the c10d store of a job, served by rank 0 and joined by the others, at an address that is known.
//
// Flow:    rendezvous.cc -> here -> base/sockets/endpoint.h, store_client.h
// Owns:    the store lives in the process that serves it
// Threads: call from one thread
// Ranks:   rank 0 serves, the others join
#pragma once

#include <string>

#include "agent/clusters/environment.h"
#include "agent/meet/job_secret.h"
#include "lockstep/base/sockets/endpoint.h"
#include "lockstep/collective/meet/store_ptr.h"

namespace lockstep {

inline constexpr milliseconds kRetryEvery{2};

// A name may be new: where machines start with the job, DNS learns it a little later, so it is tried until the deadline.
// Throws RendezvousError.
AddressList resolve(const Endpoint& endpoint, const Deadline& deadline);

// c10d's own server would listen on every interface; this one listens at `endpoint` only. Of `ports` ports from
// endpoint.port on it takes the first that nobody has. Throws RendezvousError.
UniqueFd listen_on(const Endpoint& endpoint, const Deadline& deadline, int ports = 1);

// Serves a store where `listener` listens, for whoever has the secret. Does not wait for anybody.
StorePtr serve_store(UniqueFd listener, SecretPtr secret, milliseconds timeout);

// Blocks until a store with this secret answers there; of several ports, the store of this job. Throws RendezvousError.
StorePtr join_store(const Endpoint& endpoint, const JobEnvironment& job, SecretPtr secret, milliseconds timeout,
                    int ports = 1);

// Finds the secret of the ranks that meet at `place`, a text that is the same on all of them. Throws EnvironmentError.
SecretPtr secret_of(const JobEnvironment& job, const std::string& place);

// Size, and the name that its launcher gave it.
std::string name_of_job(const JobEnvironment& job);

// Two jobs that were given one MASTER_PORT: ranks of the second reach the store of the first. They are told apart by the
// job's size and name, or else by a rank that comes twice. Nothing that the first job reads is changed. Throws
// RendezvousError, which calls the store `where`.
void require_own_job(c10d::Store& store, const std::string& where, const JobEnvironment& job);

// Blocks, in rank 0, until all others have called it, too; in the others not at all. Throws RendezvousError.
void wait_for_everyone(c10d::Store& store, const std::string& where, const JobEnvironment& job,
                       const Deadline& deadline);

// Blocks until it is set, at most for the store's timeout. Throws RendezvousError.
std::string text_in(c10d::Store& store, const std::string& key);

}  // namespace lockstep
