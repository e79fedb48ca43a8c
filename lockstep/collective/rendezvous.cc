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
#include <array>
#include <atomic>
#include <cerrno>
#include <climits>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <future>
#include <map>
#include <memory>
#include <optional>
#include <thread>
#include <vector>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "lockstep/base/file.h"
#include "lockstep/base/log.h"
#include "lockstep/base/port.h"
#include "lockstep/base/text.h"
#include "lockstep/base/unique_fd.h"
#include "lockstep/collective/interfaces.h"
#include "lockstep/deadline.h"
#include "lockstep/error.h"
#include "lockstep/launch/launcher_store.h"

namespace lockstep {
namespace {

namespace fs = std::filesystem;
using std::chrono::milliseconds;

constexpr milliseconds kRetryEvery{2};
constexpr milliseconds kResolveEvery{200};
constexpr milliseconds kStrangerAnswersIn{1000};  // at a port that may be another program's
constexpr milliseconds kOwnNameKnownIn{5000};
constexpr const char* kLoopback = "127.0.0.1";
constexpr int kAnyPort = 1;  // where only the route counts

struct Endpoint {
  std::string host;
  int port = 0;
  std::string text() const { return concat(host, ":", port); }
};

using AddressList = std::unique_ptr<addrinfo, void (*)(addrinfo*)>;

struct Lookup {
  int failed;  // getaddrinfo's code
  AddressList addresses;
};

// getaddrinfo has no deadline (a name server that does not answer), so it gets a thread, which is left behind if it hangs.
std::future<Lookup> look_up(const Endpoint& endpoint, int socket_type) {
  std::packaged_task<Lookup()> task([endpoint, socket_type] {
    addrinfo hints{};
    hints.ai_family = AF_UNSPEC;
    hints.ai_socktype = socket_type;
    addrinfo* found = nullptr;
    const int failed = ::getaddrinfo(endpoint.host.c_str(), std::to_string(endpoint.port).c_str(), &hints, &found);
    return Lookup{failed, {found, [](addrinfo* list) {
                             if (list != nullptr) ::freeaddrinfo(list);
                           }}};
  });
  auto result = task.get_future();
  std::thread(std::move(task)).detach();
  return result;
}

RendezvousError cannot_resolve(const Endpoint& endpoint, const std::string& why) {
  return RendezvousError({.what = concat("can't resolve MASTER_ADDR=", endpoint.host, ": ", why),
                          .likely = "a name that this machine does not know, or a name server that does not answer",
                          .next = "set MASTER_ADDR to rank 0's address or to a name in /etc/hosts or DNS"});
}

// A name may be new: where machines start with the job, DNS learns it a little later.
AddressList resolve(const Endpoint& endpoint, const Deadline& deadline, int socket_type = SOCK_STREAM) {
  for (bool told = false;; told = true) {
    auto lookup = look_up(endpoint, socket_type);
    if (lookup.wait_for(deadline.left()) != std::future_status::ready)
      throw cannot_resolve(endpoint, "no answer before the deadline");
    auto [failed, addresses] = lookup.get();
    if (failed == 0) return std::move(addresses);
    const bool may_come = failed == EAI_AGAIN || failed == EAI_NONAME || failed == EAI_NODATA;
    if (!may_come || deadline.passed()) throw cannot_resolve(endpoint, ::gai_strerror(failed));
    if (!told) log_warning(concat("MASTER_ADDR=", endpoint.host, ": ", ::gai_strerror(failed), "; trying again"));
    std::this_thread::sleep_for(std::min(kResolveEvery, deadline.left()));
  }
}

std::string host_name() {
  std::array<char, HOST_NAME_MAX + 1> name{};
  ::gethostname(name.data(), name.size() - 1);
  return name.data();
}

// "10.0.0.2": what c10d's client resolves without asking a name server.
std::string numeric(const sockaddr* address, socklen_t length) {
  std::array<char, NI_MAXHOST> text{};
  if (::getnameinfo(address, length, text.data(), text.size(), nullptr, 0, NI_NUMERICHOST) != 0)
    throw system_error("write down", "a network address");
  return text.data();
}

RendezvousError cannot_listen(const Endpoint& endpoint) {
  const bool in_use = errno == EADDRINUSE;
  return RendezvousError(
      {.what = concat("rank 0 can't listen on ", endpoint.text(), ": ", std::strerror(errno)),
       .here = concat("MASTER_ADDR=", endpoint.host, " MASTER_PORT=", endpoint.port),
       .peer = in_use ? listener_of_port(endpoint.port) : "",
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
// works. c10d's own server would listen on every interface; this one listens where MASTER_ADDR says. Of `ports` ports
// from endpoint.port on it takes the first that nobody has.
UniqueFd listen_on(const Endpoint& endpoint, const Deadline& deadline, int ports = 1) {
  for (int port = endpoint.port; port < endpoint.port + ports; ++port) {
    const AddressList addresses = resolve({endpoint.host, port}, deadline);
    for (const addrinfo* address = addresses.get(); address != nullptr; address = address->ai_next)
      if (UniqueFd fd = listen_at(*address)) return fd;
    if (errno != EADDRINUSE) break;
  }
  throw cannot_listen(endpoint);
}

// With the host as a number.
Endpoint endpoint_of(const UniqueFd& fd) {
  sockaddr_storage address{};
  socklen_t length = sizeof address;
  if (::getsockname(fd.get(), reinterpret_cast<sockaddr*>(&address), &length) != 0)
    throw system_error("read the address of", "the rendezvous socket");
  return {numeric(reinterpret_cast<sockaddr*>(&address), length),
          ntohs(address.ss_family == AF_INET6 ? reinterpret_cast<sockaddr_in6*>(&address)->sin6_port
                                              : reinterpret_cast<sockaddr_in*>(&address)->sin_port)};
}

bool is_connected(const pollfd& socket) {
  int error = 0;
  socklen_t size = sizeof error;
  return socket.revents != 0 && ::getsockopt(socket.fd, SOL_SOCKET, SO_ERROR, &error, &size) == 0 && error == 0;
}

// The address that answers, of a name that may have several; nothing where none does. Tries all at once, because one of
// them may not answer before the deadline.
std::optional<std::string> answering(const AddressList& addresses, const Deadline& deadline) {
  std::vector<UniqueFd> sockets;
  std::vector<pollfd> waiting;
  std::map<int, std::string> names;  // by descriptor
  for (const addrinfo* address = addresses.get(); address != nullptr; address = address->ai_next) {
    UniqueFd fd(::socket(address->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    if (!fd) continue;
    names[fd.get()] = numeric(address->ai_addr, address->ai_addrlen);
    if (::connect(fd.get(), address->ai_addr, address->ai_addrlen) == 0) return names[fd.get()];
    if (errno != EINPROGRESS) continue;
    waiting.push_back({.fd = fd.get(), .events = POLLOUT, .revents = 0});
    sockets.push_back(std::move(fd));
  }
  while (!waiting.empty() && ::poll(waiting.data(), waiting.size(), static_cast<int>(deadline.left().count())) > 0) {
    if (const auto found = std::ranges::find_if(waiting, is_connected); found != waiting.end()) return names[found->fd];
    std::erase_if(waiting, [](const pollfd& socket) { return socket.revents != 0; });
  }
  return std::nullopt;
}

// c10d's client waits a second between attempts; this saves that second for a rank that is slightly early.
Endpoint wait_for_answer(const Endpoint& endpoint, const JobEnvironment& job, const Deadline& deadline) {
  const AddressList addresses = resolve(endpoint, deadline);
  for (;;) {
    if (const auto address = answering(addresses, deadline)) return {*address, endpoint.port};
    if (deadline.passed())
      throw RendezvousError({.what = concat("rank ", job.rank, " found nobody at ", endpoint.text()),
                             .likely = "rank 0 did not start, died early, or has another MASTER_ADDR or MASTER_PORT",
                             .next = "look at rank 0's output; `lockstep env` shows what each rank was told"});
    std::this_thread::sleep_for(kRetryEvery);
  }
}

// The store at `endpoint`, whose host is a number; served here where there is a listener.
c10::intrusive_ptr<c10d::Store> make_store(const Endpoint& endpoint, milliseconds timeout, UniqueFd listener = {}) try {
  c10d::TCPStoreOptions options;
  options.port = static_cast<std::uint16_t>(endpoint.port);
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
  return make_store(wait_for_answer(endpoint, job, Deadline::after(timeout)), timeout);
}

c10::intrusive_ptr<c10d::Store> serve_store(UniqueFd listener, milliseconds timeout) {
  const Endpoint endpoint = endpoint_of(listener);  // before the listener moves
  return make_store(endpoint, timeout, std::move(listener));
}

// None where there is no route to any of them.
std::optional<std::string> own_address_towards(const AddressList& addresses) {
  for (const addrinfo* address = addresses.get(); address != nullptr; address = address->ai_next) {
    const UniqueFd fd(::socket(address->ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0));
    // Connecting a datagram socket sends nothing: it only makes the kernel choose the route.
    if (fd && ::connect(fd.get(), address->ai_addr, address->ai_addrlen) == 0) return endpoint_of(fd).host;
  }
  return std::nullopt;
}

// Debian gives a machine's own name the address 127.0.1.1: rank 0 would listen where nobody else can reach it. Where the
// launcher has told its own address, rank 0 knows a better one.
Endpoint reachable_endpoint(const JobEnvironment& job, const Deadline& deadline) {
  const Endpoint endpoint{job.master_addr, job.master_port};
  if (job.local_size == job.world_size) return endpoint;
  const AddressList addresses = resolve(endpoint, deadline);
  if (!is_loopback(numeric(addresses->ai_addr, addresses->ai_addrlen))) return endpoint;
  if (job.rank == 0 && !job.launch_addr.empty())
    if (const auto mine = own_address_towards(resolve({job.launch_addr, kAnyPort}, deadline, SOCK_DGRAM)))
      return {*mine, job.master_port};
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

// Blocks until it is set, at most for the store's timeout.
std::string text_in(c10d::Store& store, const std::string& key) try {
  const auto bytes = store.get(key);
  return {bytes.begin(), bytes.end()};
} catch (const std::exception& error) {
  throw RendezvousError(
      {.what = concat("no ", key, " in the store at MASTER_PORT: ", split(error.what(), '\n').front()),
       .likely = "the store of another program, or rank 0 died",
       .next = "look at rank 0's output, or choose another MASTER_PORT"});
}

std::string name_of_job(const JobEnvironment& job) {
  return concat(job.world_size, " ranks", job.job_name.empty() ? "" : " (" + job.job_name + ")");
}

// Two jobs that were given one MASTER_PORT: ranks of the second reach the store of the first. They are told apart by the
// job's size and name, or else by a rank that comes twice. Nothing that the first job reads is changed.
void require_own_job(c10d::Store& store, const Endpoint& endpoint, const JobEnvironment& job) {
  const std::string mine = name_of_job(job);
  const auto refuse = [&](const std::string& what, const std::string& who) {
    throw RendezvousError({.what = concat("rank ", job.rank, " met ", what, " at ", endpoint.text()),
                           .here = concat("rank ", job.rank, " of ", mine),
                           .peer = who,
                           .likely = "two jobs with one MASTER_PORT",
                           .next = "wait for the other job, or choose another MASTER_PORT"});
  };
  if (job.rank == 0) store.set("job", mine);
  if (const std::string theirs = text_in(store, "job"); theirs != mine) refuse("another job", "a job of " + theirs);
  const std::string seat = concat("rank/", job.rank, "/");
  const std::int64_t number = store.add(seat, 1);
  store.set(concat(seat, number), concat("pid ", ::getpid(), " on ", host_name()));
  if (number > 1) refuse(concat("another rank ", job.rank), text_in(store, seat + "1"));
}

// Rank 0 took the first port that nobody had; at those before it other programs answer, or another job's rank 0.
c10::intrusive_ptr<c10d::Store> find_own_job(const Endpoint& endpoint, const JobEnvironment& job, milliseconds timeout) {
  const std::string key = concat(attempt(), "/job");
  for (const Deadline deadline = Deadline::after(timeout); !deadline.passed(); std::this_thread::sleep_for(kRetryEvery))
    for (int port = job.master_port; port < job.master_port + job.master_ports; ++port) {
      const auto answered = answering(resolve({endpoint.host, port}, deadline), Deadline::after(kStrangerAnswersIn));
      if (!answered) continue;
      try {
        const auto probe = make_store({*answered, port}, kStrangerAnswersIn);
        if (!probe->check({key}) || text_in(*probe, key) != name_of_job(job)) continue;
        return make_store({*answered, port}, timeout);
      } catch (const std::exception&) {  // no store
      }
    }
  throw RendezvousError({.what = concat("rank ", job.rank, " found nobody of its job at ", endpoint.text(), " to ",
                                        job.master_port + job.master_ports - 1),
                         .likely = "rank 0 did not start, or died early, or a firewall drops packets to these ports",
                         .next = "look at rank 0's output; or set MASTER_PORT, on all ranks, to a port that is open"});
}

c10::intrusive_ptr<c10d::Store> connect_at_address(const JobEnvironment& job, milliseconds timeout) {
  const Deadline deadline = Deadline::after(timeout);
  const Endpoint endpoint = reachable_endpoint(job, deadline);
  const bool agent = agent_serves_store();
  auto store = job.rank == 0 && !agent  ? serve_store(listen_on(endpoint, deadline, job.master_ports), timeout)
               : job.master_ports > 1 ? find_own_job(endpoint, job, timeout)
                                      : join_store(endpoint, job, timeout);
  auto own = c10::make_intrusive<c10d::PrefixStore>(attempt(), std::move(store));
  if (!agent) require_own_job(*own, endpoint, job);
  return own;
}

// Note [Rendezvous through mpirun]
// mpirun carries short texts between the ranks, so that they need no address in advance: each rank gives the addresses
// of its machine; rank 0 takes the one of its own that is in a network with another machine, listens on a free port
// there, and gives the others both. Two rounds; after that mpirun is not asked any more.

std::string address_of_rank_0(LauncherStore& launcher, const std::string& name, const JobEnvironment& job,
                              const Deadline& deadline) {
  const std::vector<std::string> mine = own_addresses();
  for (int rank = 1; rank < job.world_size; ++rank) {
    const std::vector<std::string> theirs = split(launcher.get(rank, name), ',');
    if (theirs == mine) continue;  // on this machine
    if (const std::string near = address_near(theirs); !near.empty()) return near;
    for (const std::string& other : theirs)
      if (std::ranges::find(mine, other) == mine.end())
        if (const auto by_route = own_address_towards(resolve({other, kAnyPort}, deadline, SOCK_DGRAM))) return *by_route;
  }
  throw RendezvousError({.what = "rank 0 has no network address at which other machines reach it",
                         .here = concat("rank 0 of ", job.world_size, "; its addresses: ", join(mine, ", ")),
                         .likely = "machines without a network in common",
                         .next = "set MASTER_ADDR and MASTER_PORT on all ranks; GLOO_SOCKET_IFNAME names an interface"});
}

c10::intrusive_ptr<c10d::Store> connect_through_launcher(const JobEnvironment& job, milliseconds timeout) {
  const Deadline deadline = Deadline::after(timeout);
  static std::atomic<int> meetings{0};
  const std::string number = concat(++meetings);  // a name is given once
  const auto launcher = open_launcher_store(job, timeout);
  launcher->put("addresses" + number, join(own_addresses(), ","));
  launcher->fence();
  c10::intrusive_ptr<c10d::Store> served;
  if (job.rank == 0) {
    UniqueFd listener = listen_on({address_of_rank_0(*launcher, "addresses" + number, job, deadline), 0}, deadline);
    const Endpoint endpoint = endpoint_of(listener);
    served = serve_store(std::move(listener), timeout);
    launcher->put("endpoint" + number, concat(endpoint.port, ",", endpoint.host));
  }
  launcher->fence();
  if (served) return served;
  const auto parts = split(launcher->get(0, "endpoint" + number), ',');
  Endpoint endpoint{parts.back()};
  parse_int(parts.front(), endpoint.port);
  return join_store(endpoint, job, timeout);
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
  UniqueFd listener = listen_on({kLoopback, 0}, Deadline::after(timeout));
  const int port = endpoint_of(listener).port;
  auto store = serve_store(std::move(listener), timeout);
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

c10d::Store* beneath_prefixes(c10d::Store* store) {
  while (auto* prefixed = dynamic_cast<c10d::PrefixStore*>(store)) store = prefixed->getUnderlyingStore().get();
  return store;
}

}  // namespace

c10::intrusive_ptr<c10d::Store> connect_store(const JobEnvironment& job, milliseconds timeout) {
  if (!job.master_addr.empty()) return connect_at_address(job, timeout);
  if (job.world_size > job.local_size) return connect_through_launcher(job, timeout);
  return job.rank == 0 ? serve_through_file(job, timeout) : join_through_file(job, timeout);
}

std::string address_towards(const std::string& host, milliseconds timeout) {
  const Endpoint endpoint{host, kAnyPort};
  const AddressList addresses = resolve(endpoint, Deadline::after(timeout), SOCK_DGRAM);
  if (const auto mine = own_address_towards(addresses)) return *mine;
  throw system_error("find a route to", host);
}

std::string address_towards_store(c10d::Store& store, milliseconds timeout) {
  if (const auto* tcp = dynamic_cast<const c10d::TCPStore*>(beneath_prefixes(&store)))
    return address_towards(tcp->getHost(), timeout);
  auto lookup = look_up({host_name(), kAnyPort}, SOCK_DGRAM);
  if (lookup.wait_for(std::min(timeout, kOwnNameKnownIn)) != std::future_status::ready) return kLoopback;
  return own_address_towards(lookup.get().addresses).value_or(kLoopback);
}

}  // namespace lockstep
