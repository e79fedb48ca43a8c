// SPDX-License-Identifier: Apache-2.0
// train/timeline_file.h: the file of --trace: JSON as chrome://tracing reads it, or Perfetto's protobuf (trace_packet.proto,
// track_event.proto).
//
// Flow:    the Recordings of all ranks -> here -> a file for ui.perfetto.dev
// Threads: any
// Ranks:   no communication; one rank writes
#pragma once

#include <string>
#include <vector>

#include "lockstep/base/trace.h"

namespace lockstep {

using Recordings = std::vector<trace::Recording>;  // of each rank, in their order

bool is_timeline_file(const std::string& file);  // its name ends in .json or .pftrace

// complete: every rank came to its end. Times begin with 0 at the first span. Throws SystemError.
void write_timeline(const std::string& file, const Recordings& recordings, bool complete);

}  // namespace lockstep
