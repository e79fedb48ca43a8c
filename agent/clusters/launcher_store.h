// SPDX-License-Identifier: Apache-2.0
// agent/clusters/launcher_store.h: short texts that the ranks of an mpirun give one another through it, before they know each
// other's addresses.
//
// Flow:    mpirun's daemons (PMIx of Open MPI, PMI of MPICH) <-> here <-> collective/meet/rendezvous.h
// Owns:    with PMIx the process's connection to mpirun, until the process exits: PMIx can't be opened twice, and an MPI in
//          the same process uses the same one
// Threads: one at a time
// Ranks:   all ranks make the same calls of fence()
#pragma once

#include <memory>
#include <string>

#include "agent/clusters/environment.h"
#include "lockstep/deadline.h"

namespace lockstep {

class LauncherStore {
 public:
  virtual ~LauncherStore() = default;

  // A text without blanks, of at most 1,000 characters. Other ranks find it after the next fence(). A name is used once.
  virtual void put(const std::string& name, const std::string& text) = 0;

  // Blocks until all ranks are here. Throws RendezvousError at the deadline, SystemError if mpirun is gone.
  virtual void fence() = 0;

  // Returns what `rank` has put before the last fence(). Throws RendezvousError.
  virtual std::string get(int rank, const std::string& name) = 0;
};

// Opens that of Open MPI or MPICH. Throws RendezvousError: the job's launcher has none, or none that can be reached.
std::unique_ptr<LauncherStore> open_launcher_store(const JobEnvironment& job, milliseconds timeout);
std::unique_ptr<LauncherStore> open_pmix(milliseconds timeout);  // Open MPI's: pmix.cc
std::unique_ptr<LauncherStore> open_pmi(milliseconds timeout);   // MPICH's: pmi.cc

}  // namespace lockstep
