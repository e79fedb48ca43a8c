// SPDX-License-Identifier: Apache-2.0
// `lockstep run`: starts a program once per rank on this machine. Its options have torchrun's names.
#include <CLI/CLI.hpp>

#include "cli/commands.h"
#include "lockstep/base/command_line.h"
#include "lockstep/base/text.h"
#include "lockstep/cores.h"
#include "lockstep/launch/launcher.h"

namespace lockstep {
namespace {

struct RunArguments {
  std::string ranks = "1";
  std::string master_addr;
  std::string output = "prefix";
  double grace_seconds = 5;
  bool no_pin = false;
  int workers = 0;
  LaunchOptions launch;  // the rest
};

// Names the program in the usage line, and of an option with two spellings only the first.
class HelpFormatter : public CLI::Formatter {
 public:
  std::string make_usage(const CLI::App*, std::string) const override {
    return "usage: lockstep run [OPTIONS] [--] PROGRAM [ARGS...]\n";
  }
  std::string make_option_name(const CLI::Option* option, bool positional) const override {
    return option->get_name(positional, false);
  }
};

void add_job_options(CLI::App& app, RunArguments& arguments) {
  LaunchOptions& launch = arguments.launch;
  app.add_option("--nproc-per-node,--nproc_per_node", arguments.ranks, "ranks on this machine; auto: one per core");
  app.add_option("--servers", launch.servers, "of a parameter server, on this machine: its first ranks");
  app.add_option("--workers", arguments.workers, "ranks beside --servers, in place of --nproc-per-node")
      ->default_str("");
  app.add_flag("--workers-may-fail", launch.workers_may_fail, "go on when a worker fails, while others are left");
  app.add_option("--nnodes", launch.nodes, "machines");
  app.add_option("--node-rank,--node_rank", launch.node_rank, "which machine this is, from 0");
  app.add_option("--master-addr,--master_addr", arguments.master_addr, "the machine of rank 0");
  app.add_option("--master-port,--master_port", launch.master_port, "a free port there; 0: any, for one machine");
}

void add_rank_options(CLI::App& app, RunArguments& arguments) {
  LaunchOptions& launch = arguments.launch;
  app.add_option("--output", arguments.output, "prefix: lines with [rank N] before them; split: files in --log-dir")
      ->check(CLI::IsMember({"prefix", "split"}));
  app.add_option("--log-dir,--log_dir", launch.log_dir, "folder for rankN.out and rankN.err");
  app.add_option("--threads-per-rank", launch.threads_per_rank, "OMP_NUM_THREADS; 0: cores / ranks");
  app.add_flag("--no-pin", arguments.no_pin, "let every rank use every core");
  app.add_option("--grace", arguments.grace_seconds, "seconds between SIGTERM and SIGKILL")
      ->check(CLI::Range(0.0, 86400.0));
}

int number_of_ranks(const std::string& text) {
  if (text == "auto") return static_cast<int>(usable_cores().size());
  int ranks = 0;
  if (!parse_int(text, ranks))
    throw UsageError({.what = concat("--nproc-per-node is '", text, "'"), .next = "give a number, or auto"});
  return ranks;
}

LaunchOptions launch_options(const RunArguments& arguments) {
  LaunchOptions options = arguments.launch;
  options.ranks = arguments.workers > 0 ? options.servers + arguments.workers : number_of_ranks(arguments.ranks);
  options.output = arguments.output == "split" ? RankOutput::kSplit : RankOutput::kPrefix;
  options.grace = std::chrono::milliseconds(static_cast<long>(arguments.grace_seconds * 1000));
  options.pin = !arguments.no_pin;
  if (!arguments.master_addr.empty()) options.master_addr = arguments.master_addr;
  if (options.nodes > 1 && arguments.master_addr.empty())
    throw UsageError(
        {.what = "several machines need an address at which they find each other",
         .here = concat("--nnodes ", options.nodes),
         .next = "give every machine the same --master-addr HOST and --master-port PORT, those of rank 0"});
  return options;
}

// PROGRAM and its arguments: what CLI11 has not parsed, with or without a leading "--".
std::vector<std::string> command_of(const CLI::App& app) {
  std::vector<std::string> command = app.remaining();
  if (command.empty()) return command;
  if (command.front() == "--") return {command.begin() + 1, command.end()};
  if (command.front().starts_with('-'))
    throw UsageError({.what = concat("lockstep run has no option ", command.front()),
                      .next = "see lockstep run --help; put -- before a program whose name starts with a dash"});
  return command;
}

}  // namespace

int run_command(int argc, char** argv) {
  CLI::App app("Starts PROGRAM once per rank on this machine, and ends all ranks when one fails.", "lockstep run");
  app.formatter(std::make_shared<HelpFormatter>());
  app.prefix_command();
  app.option_defaults()->always_capture_default();
  RunArguments arguments;
  add_job_options(app, arguments);
  add_rank_options(app, arguments);
  return parse_and_run(app, argc, argv, [&] {
    const LaunchOptions options = launch_options(arguments);
    const LaunchResult result = launch(options, command_of(app));
    if (result.failure) std::cerr << describe(*result.failure, options) << '\n';
    return result.exit_code;
  });
}

}  // namespace lockstep
