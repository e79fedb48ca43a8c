// SPDX-License-Identifier: Apache-2.0
// cli/top/jobs.h: the jobs of this user that run on this machine.
//
// Flow:    /proc, lockstep/observe/job_page.h -> here -> cli/jobs.cc, cli/top/job_trace.h
// Owns:    the pages' mappings
// Threads: one
//
// A page is found among the descriptors of the process that has made it: nothing has to be registered, and nothing is left
// when a job dies. The kernel lets only the same user (and root) see them. A launcher's page is one job; pages that ranks
// have made for themselves are one job where the ranks meet at the same place.
#pragma once

#include <cstdint>
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
  int number = 0;          // the launcher's pid; without one the lowest pid of its ranks
  std::string name;        // of the program: "train.py"
  std::string command;     // as it was started
  int64_t started_at = 0;  // ns since 1970
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

std::string file_of(int pid, const std::string& name);  // the content of /proc/PID/NAME; empty: the process has ended
char state_of(int pid);                                 // of the main thread, as in ps; 0: it has ended
bool has_ended(const Job& job);

}  // namespace lockstep::top
