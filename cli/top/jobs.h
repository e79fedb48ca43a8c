// SPDX-License-Identifier: Apache-2.0
// cli/top/jobs.h: the jobs of this user that run on this machine, and what their ranks have published so far.
//
// Flow:    /proc, lockstep/observe/job_page.h -> here -> cli/top/view.h
// Owns:    the pages' mappings
// Threads: one
//
// A page is found among the descriptors of the process that has made it: nothing has to be registered, and nothing is left
// when a job dies. The kernel lets only the same user (and root) see them. A launcher's page is one job; pages that ranks
// have made for themselves are one job where the ranks meet at the same place.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "lockstep/observe/job_page.h"

namespace lockstep::top {

struct Seat {
  std::shared_ptr<const JobPage> page;
  int number = 0;

  RankRecord& record() const { return page->record(number); }
};

struct Job {
  int number = 0;               // the launcher's pid; without one the lowest pid of its ranks
  std::string name;             // of the program: "train.py"
  std::string command;          // as it was started
  std::int64_t started_at = 0;  // ns since 1970
  int world_size = 0;
  int nodes = 1;
  int node_rank = 0;
  std::vector<Seat> seats{};  // by rank
};

struct Found {
  std::vector<Job> jobs;          // by number
  std::vector<int> unreadable{};  // processes whose page is of another version of lockstep
};
Found find_jobs();  // looks at every process of this user: some milliseconds

// The one of this number or name. Throws UsageError: there is none, or several.
Job find_job(const std::string& number_or_name);

// ---- A look at a rank: what it has published, and what the kernel says

using PhaseSums = std::array<std::int64_t, kPhases>;

struct ServerLook {
  int clients = 0;  // 0: no server
  int in_hand = 0;
  std::int64_t requests = 0;
  std::int64_t ns_in_hand = 0;
  std::int64_t gradients = 0;
  std::int64_t delays = 0;
  std::int64_t most_delay = 0;
};

// Times in ns. The sums have the present phase and wait in them.
struct RankLook {
  std::int64_t at = 0;
  int pid = 0;  // 0: it has not used lockstep yet
  int rank = 0;
  Phase phase = Phase::kStarting;
  std::int64_t phase_since = 0;
  std::int64_t step = -1;
  std::uint64_t moves = 0;
  std::int64_t samples = 0;
  double loss = 0;
  int loader_workers = -1;
  std::int64_t wait_since = 0;  // 0: it does not wait
  int waits_for = 0;            // pid
  bool calls_others = false;
  PhaseSums in_phase{};
  PhaseSums waited{};
  std::map<int, std::int64_t> waited_for{};  // by pid
  ServerLook server{};

  char state = 0;  // of its process, as in ps; 0: it has ended
  std::int64_t resident_bytes = 0;
  std::int64_t shared_bytes = 0;     // of these
  std::int64_t ns_without_core = 0;  // its main thread wanted to run, sum
};
RankLook look_at(const Seat& seat);

struct JobLook {
  Job job;
  std::vector<RankLook> ranks;
};
JobLook look_at(const Job& job);

bool has_ended(const Job& job);

}  // namespace lockstep::top
