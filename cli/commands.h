// SPDX-License-Identifier: Apache-2.0
// cli/commands.h: the subcommands that are part of `lockstep` itself. Each gets argv from its own name on and returns
// the exit code. Exceptions are main's to print.
#pragma once

#include <chrono>

namespace lockstep {

int jobs_command(int argc, char** argv);
int run_command(int argc, char** argv);
int trace_command(int argc, char** argv);
int env_command(int argc, char** argv);

inline std::chrono::milliseconds in_milliseconds(double seconds) {
  return std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::duration<double>(seconds));
}

}  // namespace lockstep
