// SPDX-License-Identifier: Apache-2.0
// observe/timeline_file.h: the file of --trace, JSON as Perfetto and chrome://tracing read it; and the rings beside it,
// FILE.rank3, from which it can be made when ranks have died.
//
// Flow:    the Recordings of all ranks, or what ranks have left -> here -> a file for ui.perfetto.dev
// Threads: any
// Ranks:   no communication; one rank writes
#pragma once

#include <string>
#include <vector>

#include "lockstep/observe/trace.h"

namespace lockstep {

constexpr int kTraceFormat = 1;  // of the file's JSON, and of what it says about the run

using Recordings = std::vector<trace::Recording>;  // of each rank, in their order

void require_timeline_file(const std::string& file);  // throws UsageError: its name, if any, does not end in .json

// complete: every rank came to its end. Times begin with 0 at the first span. Throws SystemError.
void write_timeline(const std::string& file, const Recordings& recordings, bool complete);

// ---- Rings

std::string ring_file(const std::string& file, int rank);

// Puts the rings beside `file` into it and removes them. Marks it as incomplete unless all ranks have finished and the job
// `ended_well`. Returns false if there are none. A ring that can't be read, or of an earlier job, stays, with a warning.
// Throws SystemError.
bool merge_rings(const std::string& file, bool ended_well = true);

// As merge_rings() for a run that may have failed: an error is a warning in the log.
void save_what_is_left(const std::string& file, bool ended_well = true);

void remove_rings(const std::string& file);  // of an earlier run

}  // namespace lockstep
