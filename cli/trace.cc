// SPDX-License-Identifier: Apache-2.0
// `lockstep trace`: makes a timeline of what ranks have left.
#include <CLI/CLI.hpp>

#include "cli/commands.h"
#include "lockstep/base/command_line.h"
#include "lockstep/base/text.h"
#include "lockstep/base/timeline_file.h"
#include "lockstep/error.h"

namespace lockstep {

int trace_command(int argc, char** argv) {
  CLI::App app("Makes FILE of FILE.rank0, FILE.rank1, ..., which ranks leave beside it, and removes them.",
               "lockstep trace");
  std::string file;
  app.add_option("FILE", file, "what the ranks were told to write: .json or .pftrace")->required();
  return parse_and_run(app, argc, argv, [&] {
    require_timeline_file(file);
    if (merge_rings(file)) return 0;
    throw DataError({.what = concat("there is no ", ring_file(file, 0), " or of another rank"),
                     .likely = "the run has written the file itself, or left them on another machine",
                     .next = "copy those of all machines to one folder"});
  });
}

}  // namespace lockstep
