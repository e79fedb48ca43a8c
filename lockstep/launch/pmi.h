// SPDX-License-Identifier: Apache-2.0
// launch/pmi.h: the texts that MPICH's mpirun (Hydra) keeps for its ranks, by version 1 of its protocol PMI: lines of
// "cmd=NAME key=value …" over the socket PMI_FD, each answered by a line.
//
// Flow:    open_launcher_store() -> here <-> the proxy that started this rank
// Owns:    nothing: the socket stays open for an MPI in this process. So neither init nor finalize is sent, which Hydra
//          takes from one user only
// Threads: one at a time, and none that is inside MPI
#pragma once

#include "lockstep/launch/launcher_store.h"

namespace lockstep {

class PmiStore : public LauncherStore {
 public:
  explicit PmiStore(std::chrono::milliseconds timeout);  // throws RendezvousError: no PMI_FD
  void put(const std::string& name, const std::string& text) override;
  void fence() override;
  std::string get(int rank, const std::string& name) override;

 private:
  std::string ask(const std::string& command, const std::string& wanted);

  int fd_ = -1;
  int rank_ = 0;
  std::chrono::milliseconds timeout_;
  std::string space_;  // where Hydra keeps the texts of this job
};

}  // namespace lockstep
