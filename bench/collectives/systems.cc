// SPDX-License-Identifier: Apache-2.0
#include "bench/collectives/systems.h"

#include <unistd.h>

#include <cstdlib>

#include "lockstep/base/text.h"

namespace lockstep::bench {
namespace {

namespace fs = std::filesystem;

bool in_path(const std::string& program) {
  const char* const path = std::getenv("PATH");
  for (const std::string& folder : split(path == nullptr ? "" : path, ':'))
    if (::access((fs::path(folder) / program).c_str(), X_OK) == 0) return true;
  return false;
}

std::string why_missing(const std::string& launcher, const std::string& program, const std::string& package) {
  if (!in_path(launcher)) return concat("no ", launcher, " here (Debian's package ", package, ")");
  if (::access(beside_this(program).c_str(), X_OK) == 0) return "";
  return concat("its compiler was not there when lockstep was built (Debian's package lib", package, "-dev)");
}

RunningSystemPtr start_mpi(const std::string& name, std::vector<std::string> command, const std::string& program,
                           int ranks) {
  command.insert(command.end(), {"-np", concat(ranks), beside_this(program)});
  const RankProgram mpirun{.command = std::move(command),
                           .body = nullptr,
                           .variables = {{"OMPI_ALLOW_RUN_AS_ROOT", "1"}, {"OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1"}}};
  return std::make_unique<RunningSystem>(name, ranks, std::vector{mpirun});
}

}  // namespace

RunningSystemPtr start_open_mpi(int ranks) {
  return start_mpi("Open MPI", {"mpirun.openmpi", "--oversubscribe"}, "collectives-openmpi", ranks);
}

RunningSystemPtr start_mpich(int ranks) { return start_mpi("MPICH", {"mpirun.mpich"}, "collectives-mpich", ranks); }

std::vector<Peer> peers() {
  return {{"Gloo", "", start_gloo},
          {"Open MPI", why_missing("mpirun.openmpi", "collectives-openmpi", "openmpi"), start_open_mpi},
          {"MPICH", why_missing("mpirun.mpich", "collectives-mpich", "mpich"), start_mpich}};
}

}  // namespace lockstep::bench
