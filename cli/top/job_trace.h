// SPDX-License-Identifier: Apache-2.0
// cli/top/job_trace.h: a timeline of a job that was started without one.
//
//   1. `until` is written into the record of every rank. Each opens a ring in memory at its next step, and records.
//   2. When all have begun, `until` becomes the end of the trace. Each rank ends at its first step after that.
//   3. The rings, which are read through /proc, become one file. Nothing else is written anywhere.
//
// A trace that nobody fetches, because this process was killed, ends by itself, too.
//
// Flow:    cli/top/jobs.h -> here -> lockstep/observe/rank_progress.cc in the ranks -> lockstep/observe/timeline_file.h
// Owns:    a descriptor of each rank's ring, so that what a rank has recorded can be read after it has died
// Threads: one
#pragma once

#include <chrono>
#include <string>

namespace lockstep::top {

struct JobTrace {
  std::string job;   // number or name
  std::string file;  // .json
  std::chrono::milliseconds length = std::chrono::seconds(5);
  std::chrono::milliseconds patience = std::chrono::seconds(30);  // for a rank's next step, at the begin and at the end
};

// Blocks for `length` and two steps. SIGINT ends the trace early. Ranks of other machines are left out, with a warning; the
// file says that it is not complete then. Throws UsageError
// (no such job, a rank is traced already), SystemError (the file can't be written; the job has ended; a rank does not come to
// its next step in time).
void trace_job(const JobTrace& order);

}  // namespace lockstep::top
