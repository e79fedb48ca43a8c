// SPDX-License-Identifier: Apache-2.0
// cli/commands.h: the subcommands that are part of `lockstep` itself. Each gets argv from its own name on and returns
// the exit code. Exceptions are main's to print.
#pragma once

#include <chrono>

#include <CLI/CLI.hpp>

#include "lockstep/base/text.h"

namespace lockstep {

int jobs_command(int argc, char** argv);
int run_command(int argc, char** argv);
int trace_command(int argc, char** argv);
int env_command(int argc, char** argv);

inline CLI::Option* add_seconds(CLI::App& app, const std::string& name, std::chrono::milliseconds& time, double least,
                                double most, const std::string& help) {
  using Seconds = std::chrono::duration<double>;
  const auto set = [&time](double seconds) {
    time = std::chrono::duration_cast<std::chrono::milliseconds>(Seconds(seconds));
  };
  return app.add_option_function<double>(name, set, help)
      ->check(CLI::Range(least, most))
      ->default_str(concat(Seconds(time).count()));
}

}  // namespace lockstep
