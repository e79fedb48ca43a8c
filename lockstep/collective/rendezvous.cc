// SPDX-License-Identifier: Apache-2.0
#include "lockstep/collective/rendezvous.h"

#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <poll.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <optional>
#include <thread>
#include <vector>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "lockstep/base/file.h"
#include "lockstep/base/text.h"
#include "lockstep/base/unique_fd.h"
#include "lockstep/deadline.h"
#include "lockstep/error.h"

namespace lockstep {
namespace {

namespace fs = std::filesystem;
using std::chrono::milliseconds;

constexpr milliseconds kRetryEvery{2};
constexpr const char* kLoopback = "127.0.0.1";

struct Endpoint {
  std::string host;
  int port = 0;
  std::string text() const { return concat(host, ":", port); }
};

using AddressList = std::unique_ptr<addrinfo, void (*)(addrinfo*)>;

AddressList resolve(const Endpoint& endpoint, int socket_type = SOCK_STREAM) {
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = socket_type;
  addrinfo* found = nullptr;
  const int failed = ::getaddrinfo(endpoint.host.c_str(), std::to_string(endpoint.port).c_str(), &hints, &found);
  if (failed != 0)
    throw RendezvousError({.what = concat("can't resolve MASTER_ADDR=", endpoint.host, ": ", ::gai_strerror(failed)),
                           .likely = "a name that this machine does not know",
                           .next = "set MASTER_ADDR to rank 0's address or to a name in /etc/hosts or DNS"});
  return {found, &::freeaddrinfo};
}

RendezvousError cannot_listen(const Endpoint& endpoint) {
  const bool in_use = errno == EADDRINUSE;
  return RendezvousError(
      {.what = concat("rank 0 can't listen on ", endpoint.text(), ": ", std::strerror(errno)),
       .here = concat("MASTER_ADDR=", endpoint.host, " MASTER_PORT=", endpoint.port),
       .likely = in_use ? "another job, or an old one that is still running, uses this port"
                        : "MASTER_ADDR is not an address of the machine that runs rank 0",
       .next = in_use ? "choose another MASTER_PORT, or leave it out on one machine: a free one is found"
                      : "set MASTER_ADDR to rank 0's machine on every rank"});
}

// None where that fails; errno says why.
UniqueFd listen_at(const addrinfo& address) {
  UniqueFd fd(::socket(address.ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (!fd) return {};
  const int yes = 1;
  ::setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
  if (::bind(fd.get(), address.ai_addr, address.ai_addrlen) == 0 && ::listen(fd.get(), SOMAXCONN) == 0) return fd;
  const int error = errno;  // closing may change it
  fd.reset();
  errno = error;
  return {};
}

// A name may have several addresses, of which some are of no use here (::1 where there is no IPv6): the first that
// works. c10d's own server would listen on every interface; this one listens where MASTER_ADDR says.
UniqueFd listen_on(const Endpoint& endpoint) {
  const AddressList addresses = resolve(endpoint);
  for (const addrinfo* address = addresses.get(); address != nullptr; address = address->ai_next)
    if (UniqueFd fd = listen_at(*address)) return fd;
  throw cannot_listen(endpoint);
}

int port_of(const UniqueFd& fd) {
  sockaddr_storage address{};
  socklen_t length = sizeof address;
  if (::getsockname(fd.get(), reinterpret_cast<sockaddr*>(&address), &length) != 0)
    throw system_error("read the port of", "the rendezvous socket");
  return ntohs(address.ss_family == AF_INET6 ? reinterpret_cast<sockaddr_in6*>(&address)->sin6_port
                                             : reinterpret_cast<sockaddr_in*>(&address)->sin_port);
}

bool is_connected(const pollfd& socket) {
  int error = 0;
  socklen_t size = sizeof error;
  return socket.revents != 0 && ::getsockopt(socket.fd, SOL_SOCKET, SO_ERROR, &error, &size) == 0 && error == 0;
}

// Tries all addresses at once, because one of them may not answer before the deadline.
bool answers(const Endpoint& endpoint, const Deadline& deadline) {
  const AddressList addresses = resolve(endpoint);
  std::vector<UniqueFd> sockets;
  std::vector<pollfd> waiting;
  for (const addrinfo* address = addresses.get(); address != nullptr; address = address->ai_next) {
    UniqueFd fd(::socket(address->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    if (!fd) continue;
    if (::connect(fd.get(), address->ai_addr, address->ai_addrlen) == 0) return true;
    if (errno != EINPROGRESS) continue;
    waiting.push_back({.fd = fd.get(), .events = POLLOUT, .revents = 0});
    sockets.push_back(std::move(fd));
  }
  while (!waiting.empty() && ::poll(waiting.data(), waiting.size(), static_cast<int>(deadline.left().count())) > 0) {
    if (std::ranges::any_of(waiting, is_connected)) return true;
    std::erase_if(waiting, [](const pollfd& socket) { return socket.revents != 0; });
  }
  return false;
}

// c10d's client waits a second between attempts; this saves that second for a rank that is slightly early.
void wait_for_answer(const Endpoint& endpoint, const JobEnvironment& job, const Deadline& deadline) {
  while (!answers(endpoint, deadline)) {
    if (deadline.passed())
      throw RendezvousError({.what = concat("rank ", job.rank, " found nobody at ", endpoint.text()),
                             .likely = "rank 0 did not start, died early, or has another MASTER_ADDR or MASTER_PORT",
                             .next = "look at rank 0's output; `lockstep env` shows what each rank was told"});
    std::this_thread::sleep_for(kRetryEvery);
  }
}

// The store at `endpoint`, served here where there is a listener.
c10::intrusive_ptr<c10d::Store> make_store(const Endpoint& endpoint, milliseconds timeout, UniqueFd listener = {}) try {
  c10d::TCPStoreOptions options;
  options.port = static_cast<std::uint16_t>(listener ? port_of(listener) : endpoint.port);
  options.isServer = static_cast<bool>(listener);
  options.waitWorkers = false;
  options.timeout = timeout;
  if (listener) options.masterListenFd = listener.release();
  return c10::make_intrusive<c10d::TCPStore>(endpoint.host, options);
} catch (const std::exception& error) {
  throw RendezvousError({.what = concat("no store at ", endpoint.text(), ": ", split(error.what(), '\n').front()),
                         .likely = "another program answers at this port, or rank 0 died",
                         .next = "look at rank 0's output, or choose another MASTER_PORT"});
}

c10::intrusive_ptr<c10d::Store> join_store(const Endpoint& endpoint, const JobEnvironment& job, milliseconds timeout) {
  wait_for_answer(endpoint, job, Deadline::after(timeout));
  return make_store(endpoint, timeout);
}

bool is_loopback(const addrinfo& address) {
  if (address.ai_family == AF_INET)
    return ntohl(reinterpret_cast<const sockaddr_in*>(address.ai_addr)->sin_addr.s_addr) >> 24 == IN_LOOPBACKNET;
  return IN6_IS_ADDR_LOOPBACK(&reinterpret_cast<const sockaddr_in6*>(address.ai_addr)->sin6_addr);
}

// Debian gives a machine's own name the address 127.0.1.1: rank 0 would listen where nobody else can reach it.
void require_reachable(const Endpoint& endpoint, const JobEnvironment& job) {
  if (job.local_size == job.world_size || !is_loopback(*resolve(endpoint))) return;
  throw RendezvousError({.what = concat("MASTER_ADDR=", endpoint.host,
                                        " is a loopback address here, but the ranks are on ", "several machines"),
                         .here = concat("rank ", job.rank, " of ", job.world_size),
                         .likely = "a name that /etc/hosts gives to 127.0.0.1 or 127.0.1.1",
                         .next = "give the address at which the other machines reach this one"});
}

// torchrun's agent serves the store itself, across restarts of the ranks: each attempt gets keys of its own.
bool agent_serves_store() {
  const char* told = std::getenv("TORCHELASTIC_USE_AGENT_STORE");
  return told != nullptr && std::string(told) == "True";
}

std::string attempt() {
  const char* restarts = std::getenv("TORCHELASTIC_RESTART_COUNT");
  return concat("lockstep/", restarts != nullptr ? restarts : "0");
}

c10::intrusive_ptr<c10d::Store> connect_at_address(const JobEnvironment& job, milliseconds timeout) {
  const Endpoint endpoint{job.master_addr, job.master_port};
  require_reachable(endpoint, job);
  const bool serve = job.rank == 0 && !agent_serves_store();
  auto store = serve ? make_store(endpoint, timeout, listen_on(endpoint)) : join_store(endpoint, job, timeout);
  return c10::make_intrusive<c10d::PrefixStore>(attempt(), std::move(store));
}

// Note [Rendezvous through a file]
// mpirun and srun give the ranks of a job a common id but no port. Rank 0 listens on a free port and writes the port,
// its pid and that process's start time into a file named after the job. The others poll the file until it names a
// process that is alive and was started at that time, so a file left by a killed job is ignored. Rank 0 removes the file
// when all ranks have connected.

// A folder that only this user may enter, in XDG_RUNTIME_DIR if that exists (under Slurm it names a folder of the
// submitting machine), else in /tmp.
fs::path private_folder() {
  const char* runtime = std::getenv("XDG_RUNTIME_DIR");
  const bool exists = runtime != nullptr && fs::is_directory(runtime);
  const fs::path folder = fs::path(exists ? runtime : "/tmp") / concat("lockstep-", ::getuid());
  ::mkdir(folder.c_str(), 0700);
  struct stat info {};
  if (::lstat(folder.c_str(), &info) != 0) throw system_error("make the folder", folder);
  if (!S_ISDIR(info.st_mode) || info.st_uid != ::getuid() || (info.st_mode & 077) != 0)
    throw RendezvousError({.what = concat(folder.string(), " is not a folder that only this user can enter"),
                           .likely = "somebody else made it",
                           .next = "remove it, or set XDG_RUNTIME_DIR to a private folder"});
  return folder;
}

fs::path rendezvous_file(const JobEnvironment& job) {
  std::string name = job.job_id;
  std::ranges::replace_if(
      name, [](unsigned char c) { return std::isalnum(c) == 0; }, '_');
  return private_folder() / concat("job-", name);
}

bool is_running(pid_t pid, const std::string& started) {
  try {
    return start_time_of(pid) == started;
  } catch (const SystemError&) {
    return false;
  }
}

std::optional<int> port_of_living_rank0(const fs::path& file) {
  std::ifstream in(file);
  int port = 0;
  pid_t pid = 0;
  std::string started;
  if (!(in >> port >> pid >> started)) return std::nullopt;
  return is_running(pid, started) ? std::optional<int>(port) : std::nullopt;
}

int wait_for_port(const fs::path& file, const JobEnvironment& job, const Deadline& deadline) {
  for (;;) {
    if (const auto port = port_of_living_rank0(file)) return *port;
    if (deadline.passed())
      throw RendezvousError({.what = concat("rank ", job.rank, " of job ", job.job_id, " found no rank 0"),
                             .here = file.string(),
                             .likely = "rank 0 did not start, or runs on another machine",
                             .next = "on several machines set MASTER_ADDR and MASTER_PORT for all ranks"});
    std::this_thread::sleep_for(kRetryEvery);
  }
}

void wait_for_everyone(c10d::Store& store, const JobEnvironment& job, const Deadline& deadline) {
  while (store.add("joined", 0) < job.world_size - 1) {
    if (deadline.passed())
      throw RendezvousError({.what = concat("only ", store.add("joined", 0) + 1, " of ", job.world_size, " ranks came"),
                             .likely = "a rank died before it got here, or runs on another machine",
                             .next = "look at the other ranks' output; on several machines set MASTER_ADDR"});
    std::this_thread::sleep_for(kRetryEvery);
  }
}

c10::intrusive_ptr<c10d::Store> serve_through_file(const JobEnvironment& job, milliseconds timeout) {
  const Endpoint endpoint{kLoopback, 0};
  UniqueFd listener = listen_on(endpoint);
  const int port = port_of(listener);
  auto store = make_store(endpoint, timeout, std::move(listener));
  const fs::path file = rendezvous_file(job);
  const std::shared_ptr<void> removed_at_exit(nullptr, [&file](void*) { ::unlink(file.c_str()); });
  write_file(file, concat(port, " ", ::getpid(), " ", start_time_of(::getpid()), "\n"));
  wait_for_everyone(*store, job, Deadline::after(timeout));
  return store;
}

c10::intrusive_ptr<c10d::Store> join_through_file(const JobEnvironment& job, milliseconds timeout) {
  const int port = wait_for_port(rendezvous_file(job), job, Deadline::after(timeout));
  auto store = join_store({kLoopback, port}, job, timeout);
  store->add("joined", 1);
  return store;
}

// None where there is no route.
std::optional<std::string> own_address_towards(const addrinfo& address) {
  const UniqueFd fd(::socket(address.ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  // Connecting a datagram socket sends nothing: it only makes the kernel choose the route.
  sockaddr_storage mine{};
  socklen_t length = sizeof mine;
  char text[NI_MAXHOST] = {};
  if (!fd || ::connect(fd.get(), address.ai_addr, address.ai_addrlen) != 0 ||
      ::getsockname(fd.get(), reinterpret_cast<sockaddr*>(&mine), &length) != 0 ||
      ::getnameinfo(reinterpret_cast<sockaddr*>(&mine), length, text, sizeof text, nullptr, 0, NI_NUMERICHOST) != 0)
    return std::nullopt;
  return text;
}

}  // namespace

c10::intrusive_ptr<c10d::Store> connect_store(const JobEnvironment& job, milliseconds timeout) {
  if (!job.master_addr.empty()) return connect_at_address(job, timeout);
  return job.rank == 0 ? serve_through_file(job, timeout) : join_through_file(job, timeout);
}

std::string address_towards(const JobEnvironment& job) {
  if (job.master_addr.empty()) return kLoopback;
  const Endpoint endpoint{job.master_addr, job.master_port};
  const AddressList addresses = resolve(endpoint, SOCK_DGRAM);
  for (const addrinfo* address = addresses.get(); address != nullptr; address = address->ai_next)
    if (const auto mine = own_address_towards(*address)) return *mine;
  throw system_error("find a route to", endpoint.text());
}

}  // namespace lockstep
