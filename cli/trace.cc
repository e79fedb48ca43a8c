// SPDX-License-Identifier: Apache-2.0
// `lockstep trace`: makes a timeline of a job that runs, or of what ranks have left.
#include <CLI/CLI.hpp>

#include "cli/commands.h"
#include "cli/top/job_trace.h"
#include "lockstep/base/command_line.h"
#include "lockstep/base/text.h"
#include "lockstep/error.h"
#include "lockstep/observe/timeline_file.h"

namespace lockstep {
namespace {

struct TraceArguments {
  std::string job_or_file;
  std::string output;
  double seconds = 5;
  double patience = 30;
};

int merge_what_ranks_left(const std::string& file) {
  if (!file.ends_with(".json"))
    throw UsageError({.what = concat("'", file, "' is not a trace: its name does not end in .json"),
                      .next = "to trace a running job, say where to: --output FILE"});
  if (merge_rings(file)) return 0;
  throw DataError({.what = concat("neither ", ring_file(file, 0), " nor another rank's file is there"),
                   .likely = "the run has joined them itself, or left them on another machine",
                   .next = "copy the files of all machines to one folder"});
}

}  // namespace

int trace_command(int argc, char** argv) {
  CLI::App app(
      "With --output: records what the ranks of a running job do, and writes it to a file for ui.perfetto.dev.\n"
      "Without: joins FILE.rank0, FILE.rank1, ..., which ranks leave, into FILE, and removes them.",
      "lockstep trace");
  TraceArguments arguments;
  app.add_option("JOB|FILE", arguments.job_or_file,
                 "a job's number or name, as `lockstep top` shows it; or the FILE of --trace")
      ->required();
  CLI::Option* const output = app.add_option("--output", arguments.output, "of a job: file (.json) to write");
  app.add_option("--seconds", arguments.seconds, "of a job: seconds to record")
      ->capture_default_str()
      ->check(CLI::Range(0.01, 86400.0))
      ->needs(output);
  app.add_option("--patience", arguments.patience, "of a job: seconds for a rank to come to its next step")
      ->capture_default_str()
      ->check(CLI::Range(0.1, 86400.0))
      ->needs(output);
  return parse_and_run(app, argc, argv, [&] {
    if (arguments.output.empty()) return merge_what_ranks_left(arguments.job_or_file);
    top::trace_job({.job = arguments.job_or_file,
                    .file = arguments.output,
                    .length = in_milliseconds(arguments.seconds),
                    .patience = in_milliseconds(arguments.patience)});
    return 0;
  });
}

}  // namespace lockstep
