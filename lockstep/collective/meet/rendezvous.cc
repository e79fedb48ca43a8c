// SPDX-License-Identifier: Apache-2.0
#include "lockstep/collective/meet/rendezvous.h"

#include <algorithm>
#include <cstdlib>
#include <utility>
#include <vector>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "agent/clusters/launcher_store.h"
#include "agent/meet/interfaces.h"
#include "lockstep/base/process/host_name.h"
#include "lockstep/base/sockets/port.h"
#include "lockstep/base/text.h"
#include "lockstep/base/to_size.h"
#include "lockstep/collective/meet/agent_store.h"
#include "lockstep/collective/meet/job_store.h"
#include "lockstep/collective/meet/machine_meeting.h"
#include "lockstep/collective/meet/store_client.h"
#include "lockstep/error.h"

namespace lockstep {
namespace {

constexpr milliseconds kOwnNameKnownIn{5000};
constexpr int kAnyPort = 1;  // where only the route counts

// Returns the address at which others reach a machine whose own name MASTER_ADDR is; "" if nothing tells it.
std::string own_address(const JobEnvironment& job, const Deadline& deadline) {
  if (is_loopback(job.master_addr)) return "";
  if (!job.other_host.empty()) {
    const auto mine = own_address_towards(look_up({job.other_host, kAnyPort}, deadline).addresses);
    if (mine && !is_loopback(*mine)) return *mine;
  }
  return address_for_others();
}

// Debian gives a machine's own name the address 127.0.1.1: rank 0 would listen where nobody else can reach it.
Endpoint reachable_endpoint(const JobEnvironment& job, const Deadline& deadline) {
  const Endpoint endpoint{job.master_addr, job.master_port};
  if (job.local_size == job.world_size) return endpoint;
  const AddressList addresses = resolve(endpoint, deadline);
  if (!is_loopback(numeric(addresses->ai_addr, addresses->ai_addrlen))) return endpoint;
  if (const std::string mine = own_address(job, deadline); !mine.empty()) return {mine, job.master_port};
  throw RendezvousError({.what = concat("MASTER_ADDR=", endpoint.host,
                                        " is a loopback address here, but the ranks are on several machines"),
                         .here = concat("rank ", job.rank, " of ", job.world_size),
                         .likely = "a name that /etc/hosts gives to 127.0.0.1 or 127.0.1.1",
                         .next = "give the address at which the other machines reach this one"});
}

// torchrun's agent keeps its store across restarts of the ranks: each attempt gets keys of its own.
std::string attempt() {
  const char* restarts = std::getenv("TORCHELASTIC_RESTART_COUNT");
  return concat("lockstep/", restarts != nullptr ? restarts : "0");
}

// Note [Rendezvous through mpirun]
// mpirun, or what the program gives as ExchangeTexts, carries texts between the ranks (docs/design/rendezvous.md), in two rounds:
// each rank gives the addresses of its machine; rank 0 gives where it listens.

std::string address_of_rank_0(LauncherStore& launcher, const JobEnvironment& job, const Deadline& deadline) {
  const std::vector<std::string> mine = own_addresses();
  for (int rank = 1; rank < job.world_size; ++rank) {
    const std::vector<std::string> theirs = split(launcher.text_of(rank), ',');
    if (theirs == mine) continue;  // on this machine
    if (const std::string near = address_near(theirs); !near.empty()) return near;
    for (const std::string& other : theirs)
      if (std::ranges::find(mine, other) == mine.end())
        if (const auto by_route = own_address_towards(resolve({other, kAnyPort}, deadline))) return *by_route;
  }
  throw RendezvousError(
      {.what = "rank 0 has no network address at which other machines reach it",
       .here = concat("rank 0 of ", job.world_size, "; its addresses: ", join(mine, ", ")),
       .likely = "machines without a network in common",
       .next = "set MASTER_ADDR and MASTER_PORT on all ranks; GLOO_SOCKET_IFNAME names an interface"});
}

// Rank 0's store; the launcher carries its endpoint to the others, who wait for it.
StorePtr serve_through(LauncherStore& launcher, const JobEnvironment& job, const Deadline& deadline,
                       milliseconds timeout) {
  StorePtr served;
  Endpoint endpoint;
  try {
    UniqueFd listener = listen_on({address_of_rank_0(launcher, job, deadline), 0}, deadline);
    endpoint = endpoint_of(listener.get());
    served = serve_store(std::move(listener), secret_of(job, endpoint.text()), timeout);
  } catch (const std::exception&) {
    launcher.exchange("none");
    throw;
  }
  launcher.exchange(endpoint.text());
  return served;
}

StorePtr connect_through(LauncherStore& launcher, const JobEnvironment& job, milliseconds timeout) {
  const Deadline deadline = Deadline::after(timeout);
  launcher.exchange(join(own_addresses(), ","));
  if (job.rank == 0) return serve_through(launcher, job, deadline, timeout);
  launcher.exchange("-");
  const std::string text = launcher.text_of(0);
  const auto endpoint = endpoint_in(text);
  if (!endpoint || endpoint->port == 0)
    throw RendezvousError(
        {.what = concat("rank 0 gives \"", text, "\" in place of an address"),
         .here = concat("rank ", job.rank, " of ", job.world_size),
         .likely = "rank 0 has failed, and its output says why; or it has another version of lockstep",
         .next = "install the same on all machines, or set MASTER_ADDR and MASTER_PORT"});
  return join_store(*endpoint, job, secret_of(job, text), timeout);
}

// Carried by what connects the processes already: one text of each rank at a time.
class ExchangedTexts final : public LauncherStore {
 public:
  explicit ExchangedTexts(const ExchangeTexts& exchange) : exchange_(exchange) {}
  void exchange(const std::string& mine) override { all_ = exchange_(mine); }
  std::string text_of(int rank) override { return all_.at(to_size(rank)); }

 private:
  const ExchangeTexts& exchange_;
  std::vector<std::string> all_;
};

c10d::Store* beneath_prefixes(c10d::Store* store) {
  while (auto* prefixed = dynamic_cast<c10d::PrefixStore*>(store)) store = prefixed->getUnderlyingStore().get();
  return store;
}

}  // namespace

StorePtr connect_at_address(const JobEnvironment& job, milliseconds timeout) {
  const Deadline deadline = Deadline::after(timeout);
  const Endpoint endpoint = reachable_endpoint(job, deadline);
  // A rank 0 that finds its port taken leaves the secret of the other job alone.
  UniqueFd listener = job.rank == 0 ? listen_on(endpoint, deadline, job.master_ports) : UniqueFd();
  const auto secret = secret_of(job, concat(job.job_id, " ", job.master_addr, ":", job.master_port));
  auto store = listener ? serve_store(std::move(listener), secret, timeout)
                        : join_store(endpoint, job, secret, timeout, job.master_ports);
  require_own_job(*store, endpoint.text(), job);
  return store;
}

StorePtr connect_store(const JobEnvironment& job, milliseconds timeout) {
  if (agent_serves_store())
    return c10::make_intrusive<c10d::PrefixStore>(
        attempt(), join_agent_store(reachable_endpoint(job, Deadline::after(timeout)), timeout));
  if (is_on_one_machine(job)) return meet_on_machine(job, timeout);
  if (!job.master_addr.empty()) return connect_at_address(job, timeout);
  return connect_through(*open_launcher_store(job, timeout), job, timeout);
}

StorePtr connect_store(const JobEnvironment& job, const ExchangeTexts& exchange, milliseconds timeout) {
  if (is_on_one_machine(job)) return meet_on_machine(job, timeout);
  ExchangedTexts texts(exchange);
  return connect_through(texts, job, timeout);
}

StorePtr connect_process_group(JobEnvironment job, milliseconds timeout) {
  const Deadline deadline = Deadline::after(timeout);
  job.job_id += " process group";
  auto store = connect_store(job, timeout);
  if (agent_serves_store() || is_on_one_machine(job)) return store;
  wait_for_everyone(*store, job.master_addr.empty() ? job.job_id : concat(job.master_addr, ":", job.master_port), job,
                    deadline);
  let_nobody_else_in(*store);
  return store;
}

void let_nobody_else_in(c10d::Store& store) {
  const auto* meeting = dynamic_cast<const MeetingStore*>(beneath_prefixes(&store));
  if (meeting != nullptr) meeting->client().stop_listening();
}

std::string address_towards(const std::string& host, milliseconds timeout) {
  const Endpoint endpoint{host, kAnyPort};
  const AddressList addresses = resolve(endpoint, Deadline::after(timeout));
  if (const auto mine = own_address_towards(addresses)) return *mine;
  throw system_error("find a route to", host);
}

std::string address_towards_store(c10d::Store& store, milliseconds timeout) {
  const auto* meeting = dynamic_cast<const MeetingStore*>(beneath_prefixes(&store));
  if (meeting != nullptr && !meeting->client().own_address().empty()) return meeting->client().own_address();
  if (const auto* tcp = dynamic_cast<const c10d::TCPStore*>(beneath_prefixes(&store)))
    return address_towards(tcp->getHost(), timeout);
  const Lookup own_name = look_up({host_name(), kAnyPort}, Deadline::after(std::min(timeout, kOwnNameKnownIn)));
  return own_address_towards(own_name.addresses).value_or("127.0.0.1");
}

}  // namespace lockstep
