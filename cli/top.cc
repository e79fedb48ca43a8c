// SPDX-License-Identifier: Apache-2.0
// `lockstep top`: what the jobs on this machine are doing.
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <thread>

#include <CLI/CLI.hpp>

#include "cli/commands.h"
#include "cli/top/json.h"
#include "cli/top/layout.h"
#include "cli/top/screen.h"
#include "cli/top/watch.h"
#include "lockstep/base/command_line.h"
#include "lockstep/base/log.h"
#include "lockstep/base/text.h"
#include "lockstep/error.h"

namespace lockstep {
namespace {

struct TopArguments {
  bool once = false;
  bool json = false;
  double interval = 1;  // seconds
  int width = 0;
};

int width_of_output(int told) {
  winsize size{};
  if (told > 0) return told;
  return ::ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0 ? size.ws_col : top::kWidthOfAllColumns;
}

void print_jobs(const std::vector<top::JobView>& jobs, int width) {
  if (jobs.empty()) std::cout << "no job of this user is running on this machine\n";
  for (std::size_t i = 0; i < jobs.size(); ++i) {
    if (i > 0) std::cout << '\n';
    for (const top::Line& line : top::lines_of(jobs[i], width)) std::cout << line.text << '\n';
  }
}

void warn_of_unreadable(const top::Watch& watch) {
  for (const int pid : watch.unreadable())
    log_warning(concat("process ", pid, " is a job of another version of lockstep: look at it with the same version"));
}

// Rates come from two looks.
int print_looks(const TopArguments& arguments) {
  const auto pause = std::chrono::duration<double>(arguments.interval);
  top::Watch watch;
  watch.look();
  warn_of_unreadable(watch);
  do {
    std::this_thread::sleep_for(pause);
    const std::vector<top::JobView> jobs = watch.look();
    if (arguments.json)
      std::cout << top::json_of(jobs) << std::endl;
    else
      print_jobs(jobs, width_of_output(arguments.width));
  } while (!arguments.once);
  return 0;
}

void require_terminal() {
  if (::isatty(STDIN_FILENO) == 1 && ::isatty(STDOUT_FILENO) == 1) return;
  throw UsageError({.what = "`lockstep top` without a terminal", .next = "use --once, or --json"});
}

}  // namespace

int top_command(int argc, char** argv) {
  TopArguments arguments;
  CLI::App app("Shows what the ranks of the jobs of this user on this machine are doing, and what holds them up.",
               "lockstep top");
  app.add_flag("--once", arguments.once, "print one look as text, and end");
  app.add_flag("--json", arguments.json, "print an object for each look, one a line; with --once a single one");
  app.add_option("--interval", arguments.interval, "seconds between looks")->capture_default_str()->check(CLI::Range(0.1, 3600.0));
  app.add_option("--width", arguments.width, "columns of --once; 0: those of the terminal, or all")
      ->check(CLI::Range(0, 1000));
  return parse_and_run(app, argc, argv, [&] {
    if (arguments.once || arguments.json) return print_looks(arguments);
    require_terminal();
    return top::show_screen(arguments.interval);
  });
}

}  // namespace lockstep
