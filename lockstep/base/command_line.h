// SPDX-License-Identifier: Apache-2.0
// base/command_line.h: what the main() of every program does around its work: it parses the command line, prints errors
// to stderr and turns them into exit codes (docs/command.md).
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
