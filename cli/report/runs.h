// SPDX-License-Identifier: Apache-2.0
// cli/report/runs.h: finds and reads the runs that a report is about.
//
// Flow:    RUN… of the command line -> here -> cli/report.cc
// Threads: any
#pragma once

#include <string>
#include <vector>

#include "cli/report/json.h"

namespace lockstep::report {

// A RUN is a metrics file; METRICS,TRACE; a trace alone; a folder with metrics.jsonl and perhaps trace.json; or the folder
// of a comparison. NAME=RUN gives it a name. The JSON file of `lockstep bench step` is one, too.
//
// {"runs": [{"name": …, "partial": [text, …], what read_metrics() returns, "trace": what read_trace() returns,
//            in a comparison "case": what comparison.json says of it}],
//  "comparison": comparison.json without its runs, or null,
//  "benchmarks": [what a file of lockstep bench step says],
//  "warnings": [text, …]}        of runs that can't be compared: different models, data
// What can't be read of a comparison is said in its run's "partial"; of anything else it is thrown. Throws UsageError,
// DataError, SystemError.
Json read_runs(const std::vector<std::string>& runs);

}  // namespace lockstep::report
