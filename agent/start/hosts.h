// SPDX-License-Identifier: Apache-2.0
// agent/start/hosts.h: starts `lockstep run` on each host of a job over ssh, and ends all when one fails.
//
// Flow:    `lockstep run --hosts` -> here -> one ssh per host -> start_remotely() there -> launcher.h
// Owns:    the ssh processes, until run_on_hosts() returns
// Threads: as launcher.h
//
// ssh's stdin brings variables: "NAME=VALUE" and a zero byte each, then another. One is the job's secret (docs/security.md). When
// stdin ends, so does the job on that host.
#pragma once

#include "agent/start/process.h"

namespace lockstep {

struct Host {
  std::string name;     // for ssh
  std::string slots{};  // its --nproc-per-node; "": not told

  bool operator==(const Host&) const = default;
};

// Reads mpirun's hostfile (lines "NAME slots=4", comments after '#'), or the list "NAME:4,NAME". Throws UsageError.
std::vector<Host> read_hosts(const std::string& file_or_list);

struct SshOptions {
  std::vector<Host> hosts;
  std::string version;               // that lockstep there has to print
  std::vector<std::string> command;  // of each host: `lockstep run` with its other options
  std::vector<std::string> program;  // the ranks'
  std::vector<std::string> exports;  // variables that they get beside LOCKSTEP_… and OMP_…
  milliseconds grace{};              // of each host
  std::optional<int> stop_code{};
};

// Asks all hosts whether they can run it, before anything is started. Blocks until all have ended, and returns the exit code. After a
// failure or a signal all get SIGTERM; a second signal, or ten seconds beyond the grace period, kills ssh. LOCKSTEP_SSH: what to run
// in place of ssh. Throws EnvironmentError: names the hosts that can't run it.
int run_on_hosts(const SshOptions& options);

// On a host takes what stdin brings; when it ends, this process gets SIGTERM. Returns what has to stay open: the secret, in memory.
// Throws EnvironmentError: nothing comes.
[[nodiscard]] UniqueFd start_remotely();

}  // namespace lockstep
