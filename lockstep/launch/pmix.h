// SPDX-License-Identifier: Apache-2.0
// launch/pmix.h: the texts that Open MPI's mpirun keeps for its ranks, by libpmix, which comes with Open MPI and is loaded
// when it is needed.
//
// Flow:    open_launcher_store() -> here <-> libpmix <-> mpirun's daemon
// Owns:    PMIx_Init, until PMIx_Finalize when the process exits: it can be called once in a process, and an
//          MPI_Init() counts on it
// Threads: one at a time; libpmix has a thread of its own
#pragma once

#include "lockstep/launch/launcher_store.h"

namespace lockstep {

class PmixStore : public LauncherStore {
 public:
  explicit PmixStore(std::chrono::milliseconds timeout);  // throws RendezvousError: no libpmix, or no answer
  void put(const std::string& name, const std::string& text) override;
  void fence() override;
  std::string get(int rank, const std::string& name) override;

 private:
  std::chrono::milliseconds timeout_;
};

}  // namespace lockstep
