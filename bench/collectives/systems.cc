// SPDX-License-Identifier: Apache-2.0
#include "bench/collectives/systems.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstdlib>

#include "lockstep/base/text.h"
#include "lockstep/error.h"

namespace lockstep::bench {
namespace {

constexpr std::chrono::minutes kLongestAnswer{5};

UniqueFd listen_at(const std::string& address) {
  sockaddr_un name{};
  name.sun_family = AF_UNIX;
  address.copy(name.sun_path, sizeof name.sun_path - 1);
  UniqueFd fd(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  constexpr int kMostRanks = 128;
  if (!fd || ::bind(fd.get(), reinterpret_cast<sockaddr*>(&name), sizeof name) != 0 ||
      ::listen(fd.get(), kMostRanks) != 0)
    throw system_error("listen at", address);
  return fd;
}

std::string mpirun_of(const std::string& mpi) { return concat(LOCKSTEP_DEPS "/", mpi, "/bin/mpirun"); }

std::string why_missing(const std::string& mpi, const std::string& program, const std::string& next) {
  for (const std::string& file : {mpirun_of(mpi), beside_this(program)})
    if (::access(file.c_str(), X_OK) != 0) return concat("no ", file, "; ", next, ", then build again");
  return "";
}

RunningSystemPtr start_mpi(const std::string& name, std::vector<std::string> command, const std::string& program,
                           int ranks) {
  command.insert(command.end(), {"-np", concat(ranks), beside_this(program)});
  return std::make_unique<RunningSystem>(name, ranks, 1, [&](int, const std::string& address) {
    command.push_back(address);
    return ProcessOptions{.command = command,
                          .variables = {{"OMPI_ALLOW_RUN_AS_ROOT", "1"}, {"OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1"}}};
  });
}

}  // namespace

RunningSystem::RunningSystem(std::string name, int ranks, int processes, const RankProgram& program)
    : name_(std::move(name)), listener_(listen_at(folder_.file("socket"))) {
  ranks_.resize(ranks);
  for (int i = 0; i < processes; ++i) processes_.emplace_back(program(i, folder_.file("socket")));
  for (int i = 0; i < ranks; ++i) accept_rank();
}

// Closing the connections ends the ranks; a Process that has not ended by then is killed.
RunningSystem::~RunningSystem() {
  ranks_.clear();
  for (const Process& process : processes_) {
    pollfd ended{.fd = process.pidfd(), .events = POLLIN, .revents = 0};
    ::poll(&ended, 1, 5000);
  }
  processes_.clear();
}

// Until there is something to read; a rank that ends first, or takes too long, is an error.
void RunningSystem::wait_readable(const UniqueFd& fd) const {
  std::vector<pollfd> polls{{.fd = fd.get(), .events = POLLIN, .revents = 0}};
  for (const Process& process : processes_) polls.push_back({.fd = process.pidfd(), .events = POLLIN, .revents = 0});
  const int ready =
      ::poll(polls.data(), polls.size(), static_cast<int>(std::chrono::milliseconds(kLongestAnswer).count()));
  if (ready > 0 && polls[0].revents != 0) return;
  throw SystemError({.what = concat("a rank of ", name_, ready > 0 ? " has ended" : " does not answer"),
                     .likely = "its own message is above",
                     .next = "leave out what it was measuring, with --operation, --ranks or --max-bytes"});
}

void RunningSystem::accept_rank() {
  wait_readable(listener_);
  UniqueFd rank(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC));
  if (!rank) throw system_error("accept a rank of", name_);
  ranks_[std::stoi(read_line(rank))] = std::move(rank);
}

std::string RunningSystem::read_line(const UniqueFd& rank) const {
  std::string line;
  for (char letter = 0; letter != '\n';) {
    wait_readable(rank);
    if (::read(rank.get(), &letter, 1) != 1) throw SystemError({.what = concat("a rank of ", name_, " has gone")});
    if (letter != '\n') line += letter;
  }
  return line;
}

std::optional<double> RunningSystem::seconds(const std::string& word) {
  const std::string line = word + "\n";
  for (const UniqueFd& rank : ranks_)
    if (::send(rank.get(), line.data(), line.size(), MSG_NOSIGNAL) < 0) throw system_error("ask a rank of", name_);
  std::vector<std::string> answers;
  for (const UniqueFd& rank : ranks_) answers.push_back(read_line(rank));
  if (answers.front() == "none") return std::nullopt;
  return std::stod(answers.front()) / 1e9;
}

// Each rank stays on a core, as lockstep's do.
RunningSystemPtr start_open_mpi(int ranks) {
  return start_mpi("Open MPI", {mpirun_of("openmpi"), "--oversubscribe", "--bind-to", "core:overload-allowed"},
                   "collectives-openmpi", ranks);
}

RunningSystemPtr start_mpich(int ranks) {
  return start_mpi("MPICH", {mpirun_of("mpich"), "-bind-to", "core"}, "collectives-mpich", ranks);
}

RunningSystemPtr start_oneccl(int ranks) {
  return start_mpi("oneCCL", {mpirun_of("mpich"), "-bind-to", "core"}, "collectives-oneccl", ranks);
}

std::vector<Peer> peers() {
  const std::string setup = "tools/setup.sh bench fetches it";
  return {{"Gloo", "", start_gloo},
          {"Open MPI", why_missing("openmpi", "collectives-openmpi", setup), start_open_mpi},
          {"MPICH", why_missing("mpich", "collectives-mpich", setup), start_mpich},
          {"oneCCL", why_missing("mpich", "collectives-oneccl", "bench/collectives/oneccl_rank.cc says how to get it"),
           start_oneccl}};
}

}  // namespace lockstep::bench
