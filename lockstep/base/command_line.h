// SPDX-License-Identifier: Apache-2.0
// base/command_line.h: what the main() of every program does around its work: it parses the command line, prints errors
// to stderr and turns them into exit codes.
//
//   0    the work is done, or --help was asked for
//   1    any error but the next
//   2    UsageError: the command line, or options that do not go together
//   else what the work returned: a failed rank's own exit code; 128 + n: signal n ended it
//
// Threads: main's
// Ranks:   every rank is a program of its own
#pragma once

#include <CLI/CLI.hpp>

#include "lockstep/base/guarded.h"

namespace lockstep {

// Parses argv with `app`, then returns what body() does. --help and mistakes on the command line end it before.
template <class Body>
int parse_and_run(CLI::App& app, int argc, const char* const* argv, const Body& body) {
  return guarded([&] {
    try {
      app.parse(argc, argv);
    } catch (const CLI::ParseError& error) {
      return app.exit(error) == 0 ? 0 : kUsage;
    }
    return body();
  });
}

}  // namespace lockstep
