// SPDX-License-Identifier: Apache-2.0
#include "agent/clusters/launcher_store.h"

#include <atomic>

#include "lockstep/base/text.h"

namespace lockstep {

std::string LauncherStore::next_name() {
  static std::atomic<int> exchanges{0};
  return concat("lockstep", ++exchanges);
}

RendezvousError mpirun_error(const std::string& what) {
  return RendezvousError(
      {.what = concat(what, ", mpirun's way to tell the ranks where to meet"),
       .likely = "another rank has ended, mpirun did not start this process, or Open MPI's libpmix.so.2 is not found",
       .next = concat("look at the other ranks' output; or ", kSetMaster)});
}

std::unique_ptr<LauncherStore> open_launcher_store(const JobEnvironment& job, milliseconds timeout) {
  if (job.launcher == "open-mpi") return open_pmix(timeout);
  if (job.launcher == "mpich") return open_pmi(timeout);
  throw RendezvousError({.what = "nothing tells the ranks on several machines where to meet",
                         .here = concat("rank ", job.rank, ", launcher ", job.launcher),
                         .next = kSetMaster});
}

}  // namespace lockstep
