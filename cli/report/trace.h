// SPDX-License-Identifier: Apache-2.0
// cli/report/trace.h: reads what `lockstep train --trace FILE.json` writes.
//
// Flow:    FILE -> here -> cli/report.cc
// Threads: any
#pragma once

#include <filesystem>

#include "cli/report/json.h"

namespace lockstep::report {

bool is_trace(const std::filesystem::path& file);  // by how it begins; throws SystemError

// {"ranks": [{"rank": 0, "name": "rank 0 on host, pid 1", "steps": n,
//             "ms": {"forward": …, …},       a step's mean, by what the thread of the loop did; inner spans are not counted twice
//             "waits_for": {"1": ms},        likewise, by the rank that had not come
//             "bytes": {"all_reduce": …},    a step's mean, all threads
//             "counters": {"memory": {"seconds": […], "value": […]}, …},     at most 300 points
//             "busy": {"step": […], "ms": […]}}],     a step's time without waiting; at most 300 points
//  "partial": [text, …]}
// Throws DataError: no span in it, or it is the ring of one rank; SystemError.
Json read_trace(const std::filesystem::path& file);

}  // namespace lockstep::report
