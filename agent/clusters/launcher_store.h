// SPDX-License-Identifier: Apache-2.0
// agent/clusters/launcher_store.h: short texts that the ranks of an mpirun give one another through it, before they know each
// other's addresses.
//
// Flow:    mpirun's daemons (PMIx of Open MPI, PMI of MPICH) <-> here <-> collective/meet/rendezvous.h
// Owns:    what pmix.cc and pmi.cc say
// Threads: one at a time
// Ranks:   all ranks make the same calls of exchange()
#pragma once

#include <memory>
#include <string>

#include "agent/clusters/environment.h"
#include "lockstep/deadline.h"
#include "lockstep/error.h"

namespace lockstep {

class LauncherStore {
 public:
  virtual ~LauncherStore() = default;

  // Gives the others a text without blanks, of at most 1,000 characters. Blocks until all ranks are here. Throws
  // RendezvousError at the deadline or if mpirun is gone.
  virtual void exchange(const std::string& mine) = 0;

  // Returns what `rank` gave in the last exchange. Throws RendezvousError.
  virtual std::string text_of(int rank) = 0;

 protected:
  static std::string next_name();  // of an exchange: mpirun takes each name once
};

// An error that says what can't be done, and what to do instead.
RendezvousError mpirun_error(const std::string& what);

// Opens that of Open MPI or MPICH. Throws RendezvousError: the job's launcher has none, or none that can be reached.
std::unique_ptr<LauncherStore> open_launcher_store(const JobEnvironment& job, milliseconds timeout);
std::unique_ptr<LauncherStore> open_pmix(milliseconds timeout);  // Open MPI's: pmix.cc
std::unique_ptr<LauncherStore> open_pmi(milliseconds timeout);   // MPICH's: pmi.cc

}  // namespace lockstep
