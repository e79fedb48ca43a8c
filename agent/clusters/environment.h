// SPDX-License-Identifier: Apache-2.0
// agent/clusters/environment.h: which rank this process is, read from the variables that a launcher sets.
//
// Flow:    torchrun, lockstep run, Slurm, Open MPI, MPICH -> here -> collective/World
// Owns:    nothing; the environment is read when read_job_environment is called and never again
// Threads: any, as long as no thread calls setenv
// Ranks:   no communication
#pragma once

#include <functional>
#include <optional>

#include "lockstep/base/process/cgroup.h"
#include "lockstep/cores.h"

namespace lockstep {

// One resolved value and where it came from: {"rank", "2", "OMPI_COMM_WORLD_RANK"}. `lockstep env` prints these.
struct Setting {
  std::string name;
  std::string value;
  std::string source;  // the variable's name, or "default"
};

struct JobEnvironment {
  std::string launcher = "none";  // none | torchrun | slurm | open-mpi | mpich
  int rank = 0;
  int world_size = 1;
  int local_rank = 0;
  int local_size = 1;       // ranks on this machine
  int local_servers = 0;    // of these: the first ones, which serve parameters to the others
  int node_rank = 0;        // the same for the ranks of a machine; Open MPI counts from 1 if mpirun's own has no ranks
  std::string master_addr;  // empty: the ranks meet through job_id, or on several machines through their launcher
  int master_port = 0;
  int master_ports = 1;    // rank 0 takes the first free one of so many, from master_port on
  std::string other_host;  // of another machine than rank 0's: the route to it is that to all of them; may be empty
  int cores = 0;           // of this rank, by the launcher's word; 0: not told
  std::string job_id;      // the same for all ranks of a job, unlike that of any other job of this user on this machine
  std::string job_name;    // given by the launcher to this job alone, for ranks that meet at master_addr; empty: none
  std::vector<Setting> settings;

  // Tells whether the launcher has started this rank as a server; none: it has told no rank so.
  std::optional<bool> serves() const {
    return local_servers > 0 ? std::optional(local_rank < local_servers) : std::nullopt;
  }
};

// What to do where nothing tells the ranks where to meet, for an error's `next`.
inline constexpr const char* kSetMaster =
    "set MASTER_ADDR to the host of rank 0 and MASTER_PORT to a free port there, on all ranks";

using VariableLookup = std::function<std::optional<std::string>(const std::string& name)>;

// Tries torchrun's variables (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT; `lockstep run` sets the same),
// Slurm's (in what srun starts), Open MPI's and MPICH's or another PMI's, in that order; none set: one rank.
// Throws EnvironmentError: a partial set (names what is missing), values that are not numbers or contradict each other
// (rank >= size), ranks that nothing tells where to meet.
JobEnvironment read_job_environment(const VariableLookup& lookup);
JobEnvironment read_job_environment();  // of this process

// The cores of this rank, out of those that it may use: a server's are all of them. Where a launcher has bound the
// ranks, or a cpuset leaves each of them no more than its share, all of them; else an even share: ranks that were not
// bound don't crowd on each other.
CoreSet cores_of(const JobEnvironment& job, const CoreSet& usable);

// How many threads this rank may keep busy: one for each of its cores, or its share of what a cgroup or Slurm allots.
int threads_of(const JobEnvironment& job, const CoreSet& cores, std::optional<double> quota = cpu_quota());

// How many cores this process and what it starts may keep busy: usable_core_count(), or fewer if Slurm allots fewer.
int allotted_cores();

// When a process was started, in clock ticks since boot: with its pid, a name that is never given twice.
// Throws SystemError: no such process.
std::string start_time_of(int pid);

}  // namespace lockstep
