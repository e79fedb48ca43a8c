// SPDX-License-Identifier: Apache-2.0
// collective/job_store.h: the c10d store of a job, served by rank 0 and joined by the others, at an address that is known.
//
// Flow:    rendezvous.cc, rendezvous_file.cc -> here -> launch/endpoint.h, c10d::TCPStore
// Owns:    the store lives in the process that serves it
// Threads: call from one thread
// Ranks:   rank 0 serves, the others join
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <string>

#include "lockstep/launch/endpoint.h"
#include "lockstep/launch/environment.h"

namespace lockstep {

inline constexpr std::chrono::milliseconds kRetryEvery{2};

// A name may be new: where machines start with the job, DNS learns it a little later, so it is tried until the deadline.
// Throws RendezvousError.
AddressList resolve(const Endpoint& endpoint, const Deadline& deadline, int socket_type = SOCK_STREAM);

// c10d's own server would listen on every interface; this one listens at `endpoint` only. Of `ports` ports from
// endpoint.port on it takes the first that nobody has. Throws RendezvousError: names the process that has the port.
UniqueFd listen_on(const Endpoint& endpoint, const Deadline& deadline, int ports = 1);

// Where `listener` listens.
c10::intrusive_ptr<c10d::Store> serve_store(UniqueFd listener, std::chrono::milliseconds timeout);

// Whether the other end answers as a c10d store does. c10d's own client would wait without a deadline for a program that
// accepts connections and never says anything. Afterwards the connection is of no more use.
bool is_store(const Connection& connection, const Deadline& deadline);

// Blocks until a store answers there. Throws RendezvousError.
c10::intrusive_ptr<c10d::Store> join_store(const Endpoint& endpoint, const JobEnvironment& job,
                                           std::chrono::milliseconds timeout);

// At once. Throws RendezvousError if it is no store that answers.
c10::intrusive_ptr<c10d::Store> store_at(const Endpoint& endpoint, std::chrono::milliseconds timeout);

// Blocks until it is set, at most for the store's timeout. Throws RendezvousError.
std::string text_in(c10d::Store& store, const std::string& key);

}  // namespace lockstep
