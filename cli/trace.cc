// SPDX-License-Identifier: Apache-2.0
// `lockstep trace`: makes a timeline of a job that runs, or of what ranks have left.
#include "cli/commands.h"
#include "cli/top/job_trace.h"
#include "lockstep/base/command_line.h"
#include "lockstep/base/text.h"
#include "lockstep/error.h"
#include "lockstep/observe/timeline_file.h"

namespace lockstep {
namespace {

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
      "With --output: records what the ranks of a running job do, and writes it to a file for "
      "ui.perfetto.dev.\nWithout: joins FILE.rank0, FILE.rank1, ..., which ranks leave, into FILE, and removes them.",
      "lockstep trace");
  top::JobTrace order;
  app.add_option("JOB|FILE", order.job, "a job's number or name, as `lockstep top` shows it; or the FILE of --trace")
      ->required();
  CLI::Option* const output = app.add_option("--output", order.file, "of a job: file (.json) to write");
  add_seconds(app, "--seconds", order.length, 0.01, 86400, "of a job: seconds to record")->needs(output);
  add_seconds(app, "--patience", order.patience, 0.1, 86400, "of a job: seconds for a rank to come to its next step")
      ->needs(output);
  return parse_and_run(app, argc, argv, [&] {
    if (order.file.empty()) return merge_what_ranks_left(order.job);
    top::trace_job(order);
    return 0;
  });
}

}  // namespace lockstep
