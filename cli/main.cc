// SPDX-License-Identifier: Apache-2.0
// `lockstep`: finds the subcommand. `run`, `jobs`, `trace` and `env` are part of this program. Any other is a program of its own in
// ../libexec/lockstep, as git does it: lockstep-<subcommand>, or tools/<subcommand>.py (tools/README.md).
#include <signal.h>
#include <unistd.h>

#include <array>
#include <iomanip>

#include "cli/commands.h"
#include "cli/installation.h"
#include "lockstep/base/command_line.h"
#include "lockstep/base/process/process_title.h"
#include "lockstep/base/text.h"

namespace lockstep {
namespace {

namespace fs = std::filesystem;

struct Subcommand {
  std::string_view name;
  std::string_view description;
  int (*function)(int argc, char** argv) = nullptr;  // none: a program of its own
};

constexpr auto kSubcommands = std::to_array<Subcommand>({
    {"train", "train a model"},
    {"eval", "measure a trained model on a dataset"},
    {"predict", "write a trained model's outputs for each sample"},
    {"run", "start a program once per rank", run_command},
    {"top", "watch the jobs on this machine"},
    {"jobs", "print their state as JSON, for programs", jobs_command},
    {"verify", "compare training on one rank and on several"},
    {"plan", "forecast a step of every strategy"},
    {"compare", "train with several strategies, side by side"},
    {"data", "pack datasets and describe them"},
    {"bench", "measure against PyTorch, Gloo and MPI"},
    {"report", "make a page of curves about runs"},
    {"trace", "make a timeline of a running job, or of files that ranks left", trace_command},
    {"env", "show every setting and where it came from", env_command},
});

// The program that trains does these, too.
bool follows_training(std::string_view subcommand) { return subcommand == "eval" || subcommand == "predict"; }

// Ends with .py if it is Python.
fs::path program_of(std::string_view subcommand) {
  if (follows_training(subcommand)) subcommand = "train";
  const fs::path folder = installation_prefix() / "libexec/lockstep";
  const fs::path script = folder / "tools" / concat(subcommand, ".py");
  return fs::exists(script) ? script : folder / concat("lockstep-", subcommand);
}

bool exists(const Subcommand& subcommand) {
  return subcommand.function != nullptr || fs::exists(program_of(subcommand.name));
}

int print_help() {
  std::cout << "usage: lockstep SUBCOMMAND [OPTIONS]      (lockstep SUBCOMMAND --help says more)\n\n";
  for (const Subcommand& subcommand : kSubcommands)
    if (exists(subcommand))
      std::cout << "  " << std::left << std::setw(8) << subcommand.name << subcommand.description << '\n';
  std::cout << "\n  --version   the version of lockstep\n";
  return 0;
}

// Holds them until training can handle them (lockstep/train/run.cc): loading libtorch takes a second.
void hold_stop_signals() {
  sigset_t held;
  ::sigemptyset(&held);
  for (const int signal : {SIGTERM, SIGUSR1, SIGUSR2}) ::sigaddset(&held, signal);
  ::sigprocmask(SIG_BLOCK, &held, nullptr);
}

// Becomes `words`, followed by the arguments of the subcommand. Returns if there is no such program.
void become(const std::string& program, std::vector<std::string> words, char** argv) {
  std::vector<char*> arguments;
  for (std::string& word : words) arguments.push_back(word.data());
  do arguments.push_back(*++argv);
  while (*argv != nullptr);
  ::execvp(program.c_str(), arguments.data());
}

int run_program(char** argv) {
  const fs::path program = program_of(argv[0]);
  if (program.extension() == ".py") {
    become("python3", {"python3", "-B", program.string()}, argv);  // -B: writes no cache beside installed files
    throw system_error(concat("start Python for `lockstep ", argv[0], "`:"), "python3");
  }
  if (fs::exists(program)) find_torch();
  const std::string name = argv[0];
  std::string title = concat("lockstep ", name);  // for ps
  if (name == "train" || follows_training(name)) {
    title += std::string(kRoomForRank, ' ');
    hold_stop_signals();
  }
  if (follows_training(argv[0])) --argv;  // it has to see the word
  become(program, {title}, argv);
  throw UsageError({.what = concat("no subcommand '", name, "'"),
                    .here = concat("no ", program.string()),
                    .next = "lockstep --help lists them all"});
}

int run(int argc, char** argv) {
  const std::string_view name = argc > 1 ? argv[1] : "--help";
  if (name == "--help" || name == "-h") return print_help();
  if (name == "--version") {
    std::cout << "lockstep " << LOCKSTEP_VERSION << '\n';
    return 0;
  }
  const auto* const found = std::ranges::find(kSubcommands, name, &Subcommand::name);
  if (found != kSubcommands.end() && found->function != nullptr) return found->function(argc - 1, argv + 1);
  return run_program(argv + 1);
}

}  // namespace
}  // namespace lockstep

int main(int argc, char** argv) {
  return lockstep::guarded([&] { return lockstep::run(argc, argv); });
}
