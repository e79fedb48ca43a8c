// SPDX-License-Identifier: Apache-2.0
// collective/rendezvous_file.h: how ranks of one machine that have a job's id in common, and no address, find each other.
//
// Flow:    rendezvous.cc -> here -> job_store.h
// Owns:    a file that only this user can read, until all ranks have connected
// Threads: call from one thread
// Ranks:   every rank calls it once
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>

#include "lockstep/launch/environment.h"

namespace lockstep {

// Blocks until rank 0 answers; rank 0 until all have connected. Throws RendezvousError at the deadline, SystemError.
c10::intrusive_ptr<c10d::Store> connect_through_file(const JobEnvironment& job, std::chrono::milliseconds timeout);

}  // namespace lockstep
