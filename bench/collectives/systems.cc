#include "bench/collectives/systems.h"

#include <poll.h>
#include <sys/mman.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <sstream>

#include "lockstep/base/cores.h"
#include "lockstep/base/deadline.h"
#include "lockstep/base/error.h"
#include "lockstep/base/text.h"
#include "lockstep/launch/process.h"

namespace lockstep::bench {
namespace {

namespace fs = std::filesystem;

constexpr std::chrono::minutes kLongestRun{10};

[[noreturn]] void failed(const std::string& system, const std::string& how) {
  throw SystemError({.what = concat("the ranks of ", system, " ", how),
                     .likely = "its own message is above",
                     .next = "run its program by hand; see bench/collectives/systems.cc"});
}

void wait_for_end(const std::string& system, const Process& process, Deadline deadline) {
  pollfd ended{.fd = process.pidfd(), .events = POLLIN, .revents = 0};
  while (!deadline.passed() && ::poll(&ended, 1, static_cast<int>(deadline.left().count())) <= 0) continue;
  const std::optional<ExitStatus> status = process.status();
  if (!status) failed(system, "did not end in time");
  if (status->signal != 0) failed(system, concat("were ended by signal ", status->signal));
  if (status->exit_code != 0) failed(system, concat("ended with code ", status->exit_code));
}

std::string read_all(int fd) {
  std::string text;
  std::array<char, 4096> buffer;
  off_t at = 0;
  for (ssize_t bytes = 0; (bytes = ::pread(fd, buffer.data(), buffer.size(), at)) > 0; at += bytes)
    text.append(buffer.data(), static_cast<std::size_t>(bytes));
  return text;
}

// The folder of this program holds those for MPI, which each MPI's own compiler has built.
fs::path beside_this(const std::string& name) { return fs::read_symlink("/proc/self/exe").parent_path() / name; }

bool in_path(const std::string& program) {
  const char* const path = std::getenv("PATH");
  for (const std::string& folder : split(path == nullptr ? "" : path, ':'))
    if (::access((fs::path(folder) / program).c_str(), X_OK) == 0) return true;
  return false;
}

std::string why_missing(const std::string& launcher, const std::string& program, const std::string& package) {
  if (!in_path(launcher)) return concat("no ", launcher, " here (Debian's package ", package, ")");
  if (::access(beside_this(program).c_str(), X_OK) == 0) return "";
  return concat("its compiler was not there when lockstep was built (Debian's package lib", package, "-dev)");
}

Seconds run_mpi(const std::string& name, std::vector<std::string> launcher, const std::string& program, int ranks,
                const Words& words) {
  launcher.insert(launcher.end(), {"-np", concat(ranks), beside_this(program).string()});
  launcher.insert(launcher.end(), words.begin(), words.end());
  return run_programs(name,
                      {{.command = launcher,
                        .body = nullptr,
                        .variables = {{"OMPI_ALLOW_RUN_AS_ROOT", "1"}, {"OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1"}}}});
}

}  // namespace

Seconds parse_seconds(int fd) {
  Seconds seconds;
  std::istringstream lines(read_all(fd));
  std::string word;
  for (double value = 0; lines >> word >> value;) seconds[word] = value;
  return seconds;
}

Seconds run_programs(const std::string& system, const std::vector<RankProgram>& programs) {
  const UniqueFd output(::memfd_create("results", MFD_CLOEXEC));
  if (!output) throw system_error("make", "a file for results");
  const Deadline deadline = Deadline::after(kLongestRun);
  std::vector<Process> processes;
  processes.reserve(programs.size());
  for (std::size_t i = 0; i < programs.size(); ++i) {
    ProcessOptions options{.command = programs[i].command, .body = programs[i].body};
    options.variables = programs[i].variables;
    options.output_fd = output.get();
    ::sigemptyset(&options.signal_mask);
    if (programs[i].pinned)
      options.cores = cores_of_rank(usable_cores(), static_cast<int>(i), static_cast<int>(programs.size()));
    processes.emplace_back(options);
  }
  for (const Process& process : processes) wait_for_end(system, process, deadline);
  return parse_seconds(output.get());
}

Seconds run_open_mpi(int ranks, const Words& words) {
  return run_mpi("Open MPI", {"mpirun.openmpi", "--oversubscribe"}, "collectives-openmpi", ranks, words);
}

Seconds run_mpich(int ranks, const Words& words) {
  return run_mpi("MPICH", {"mpirun.mpich"}, "collectives-mpich", ranks, words);
}

std::vector<Peer> peers() {
  return {{"Gloo", "", run_gloo},
          {"Open MPI", why_missing("mpirun.openmpi", "collectives-openmpi", "openmpi"), run_open_mpi},
          {"MPICH", why_missing("mpirun.mpich", "collectives-mpich", "mpich"), run_mpich}};
}

}  // namespace lockstep::bench
