// bench/command_line.h: how every benchmark reads its options.
#pragma once

#include <CLI/CLI.hpp>
#include <optional>

namespace lockstep::bench {

// Nothing: go on. Otherwise the exit code: 0 after --help, 2 after options that make no sense, which are named on
// stderr.
inline std::optional<int> parse(CLI::App& app, int argc, const char* const* argv) {
  try {
    app.parse(argc, argv);
    return std::nullopt;
  } catch (const CLI::ParseError& error) {
    constexpr int kUsage = 2;
    return app.exit(error) == 0 ? 0 : kUsage;
  }
}

}  // namespace lockstep::bench
