// SPDX-License-Identifier: Apache-2.0
#include "lockstep/collective/meet/job_store.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <optional>
#include <thread>

#include "agent/meet/secured_channel.h"
#include "lockstep/base/log.h"
#include "lockstep/base/process/host_name.h"
#include "lockstep/base/sockets/port.h"
#include "lockstep/base/text.h"
#include "lockstep/collective/meet/store_client.h"
#include "lockstep/error.h"

namespace lockstep {
namespace {

constexpr milliseconds kResolveEvery{200};
constexpr milliseconds kAskAgainEvery{50};          // who did not let this rank in
constexpr milliseconds kSecretComesWithin{60'000};  // a file in a home on NFS may be seen late

RendezvousError cannot_resolve(const Endpoint& endpoint, const std::string& why) {
  return RendezvousError({.what = concat("can't resolve MASTER_ADDR=", endpoint.host, ": ", why),
                          .likely = "a name that this machine does not know, or a name server that does not answer",
                          .next = "set MASTER_ADDR to rank 0's address or to a name in /etc/hosts or DNS"});
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

RendezvousError nobody_at(const Endpoint& endpoint, const JobEnvironment& job) {
  return RendezvousError({.what = concat("rank ", job.rank, " got no answer at ", endpoint.text()),
                          .likely = "rank 0 did not start, died early, or has another MASTER_ADDR or MASTER_PORT; or a "
                                    "firewall drops packets to this port",
                          .next = "look at rank 0's output; `lockstep env` shows what each rank was told"});
}

RendezvousError not_let_in(const Endpoint& endpoint, const JobEnvironment& job) {
  return RendezvousError(
      {.what = concat("rank ", job.rank, " was refused at ", endpoint.text(),
                      ": what listens there is not this job's store"),
       .likely =
           "another secret here than on rank 0's machine, --insecure-network on one of them only, or another program",
       .next = ways_to_a_secret()});
}

RendezvousError no_secret_here(const Endpoint& endpoint, const JobEnvironment& job) {
  return RendezvousError({.what = concat("rank ", job.rank, " has no secret for the job at ", endpoint.text()),
                          .likely = "rank 0 has put one into its home, which is not the home of this machine; or this "
                                    "machine has no munged, and rank 0's has",
                          .next = ways_to_a_secret()});
}

}  // namespace

std::string name_of_job(const JobEnvironment& job) {
  return concat(job.world_size, " ranks", job.job_name.empty() ? "" : " (" + job.job_name + ")");
}

AddressList resolve(const Endpoint& endpoint, const Deadline& deadline, int socket_type) {
  for (bool told = false;; told = true) {
    auto [failed, addresses] = look_up(endpoint, deadline, socket_type);
    if (failed == 0) return std::move(addresses);
    if (failed == EAI_INPROGRESS) throw cannot_resolve(endpoint, "no answer before the deadline");
    const bool may_come = failed == EAI_AGAIN || failed == EAI_NONAME || failed == EAI_NODATA;
    if (!may_come || deadline.passed()) throw cannot_resolve(endpoint, ::gai_strerror(failed));
    if (!told) log_warning(concat("MASTER_ADDR=", endpoint.host, ": ", ::gai_strerror(failed), "; trying again"));
    std::this_thread::sleep_for(std::min(kResolveEvery, deadline.left()));
  }
}

UniqueFd listen_on(const Endpoint& endpoint, const Deadline& deadline, int ports) {
  const AddressList addresses = resolve(endpoint, deadline);
  for (int port = endpoint.port; port < endpoint.port + ports; ++port) {
    set_port(addresses, port);
    if (UniqueFd fd = listen_at(addresses)) return fd;
    if (errno != EADDRINUSE) break;
  }
  throw cannot_listen(endpoint);
}

SecretPtr secret_of(const JobEnvironment& job, const std::string& place) {
  auto secret = std::make_shared<const JobSecret>(concat(place, " ", name_of_job(job)), job.rank == 0);
  if (secret->is_off() && job.rank == 0)
    log_warning("--insecure-network: whoever reaches this network can join the job, read it and change it");
  return secret;
}

StorePtr serve_store(UniqueFd listener, SecretPtr secret, milliseconds timeout) {
  const std::string host = endpoint_of(listener.get()).host;
  return serve_meeting(std::move(listener), admit_by(std::move(secret)), timeout, host);
}

StorePtr store_at(const AddressList& addresses, const JobSecret& secret, const Deadline& deadline,
                  milliseconds timeout) {
  auto answered = connect_securely(addresses, secret, deadline);
  return answered ? join_meeting(std::move(answered->channel), deadline, timeout, answered->address) : nullptr;
}

StorePtr join_store(const Endpoint& endpoint, const JobEnvironment& job, const JobSecret& secret,
                    milliseconds timeout) {
  const Deadline deadline = Deadline::after(timeout);
  const AddressList addresses = resolve(endpoint, deadline);
  std::optional<Deadline>
      secret_by;  // since rank 0 answered, and did not let this rank in; it may have gone since then
  for (;;) {
    if (auto answered = connect_securely(addresses, secret, deadline)) {
      if (auto store = join_meeting(std::move(answered->channel), deadline, timeout, answered->address)) return store;
      if (!secret_by) secret_by = Deadline::after(std::min(kSecretComesWithin, deadline.left()));
    }
    const bool is_late = deadline.passed();
    if (is_late && !secret_by) throw nobody_at(endpoint, job);
    if ((is_late || (secret_by && secret_by->passed())) && !secret.is_off() && !secret.find())
      throw no_secret_here(endpoint, job);
    if (is_late) throw not_let_in(endpoint, job);
    std::this_thread::sleep_for(std::min(secret_by ? kAskAgainEvery : kRetryEvery, deadline.left()));
  }
}

void require_own_job(c10d::Store& store, const std::string& where, const JobEnvironment& job) {
  const std::string mine = name_of_job(job);
  const auto refuse = [&](const std::string& what, const std::string& who) {
    throw RendezvousError({.what = concat("rank ", job.rank, " met ", what, " at ", where),
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

void wait_for_everyone(c10d::Store& store, const std::string& where, const JobEnvironment& job,
                       const Deadline& deadline) {
  std::int64_t came = store.add("joined", 1);
  for (; job.rank == 0 && came < job.world_size; came = store.add("joined", 0)) {
    if (deadline.passed())
      throw RendezvousError({.what = concat("only ", came, " of ", job.world_size, " ranks came"),
                             .here = concat("rank 0, waiting at ", where),
                             .likely = "a rank died before it got here, runs on another machine, or was refused",
                             .next = "look at the other ranks' output; on several machines set MASTER_ADDR"});
    std::this_thread::sleep_for(kRetryEvery);
  }
}

std::string text_in(c10d::Store& store, const std::string& key) try {
  return store.get_to_str(key);
} catch (const std::exception& error) {
  throw RendezvousError({.what = concat("no ", key, " in the store at MASTER_PORT: ", first_line_of(error)),
                         .likely = "the store of another program, or rank 0 died",
                         .next = "look at rank 0's output, or choose another MASTER_PORT"});
}

}  // namespace lockstep
