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

#include <exception>
#include <iostream>

#include <CLI/CLI.hpp>

#include "lockstep/error.h"

namespace lockstep {

inline constexpr int kFailed = 1;
inline constexpr int kUsage = 2;

// What body() returns, or the exit code of what it throws.
template <class Body>
int guarded(const Body& body) {
  try {
    return body();
  } catch (const UsageError& error) {
    std::cerr << error.what() << std::endl;
    return kUsage;
  } catch (const std::exception& error) {
    std::cerr << error.what() << std::endl;
    return kFailed;
  }
}

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
