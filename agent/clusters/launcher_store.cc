// SPDX-License-Identifier: Apache-2.0
#include "agent/clusters/launcher_store.h"

#include <atomic>

#include "lockstep/base/text.h"
#include "lockstep/error.h"

namespace lockstep {

std::string LauncherStore::next_name() {
  static std::atomic<int> exchanges{0};
  return concat("lockstep", ++exchanges);
}

std::unique_ptr<LauncherStore> open_launcher_store(const JobEnvironment& job, milliseconds timeout) {
  if (job.launcher == "open-mpi") return open_pmix(timeout);
  if (job.launcher == "mpich") return open_pmi(timeout);
  throw RendezvousError({.what = "nothing tells the ranks on several machines where to meet",
                         .here = concat("rank ", job.rank, ", launcher ", job.launcher),
                         .next = "set MASTER_ADDR to the host of rank 0 and MASTER_PORT to a free port there"});
}

}  // namespace lockstep
