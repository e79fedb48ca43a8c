// SPDX-License-Identifier: Apache-2.0
#include "lockstep/collective/meet/job_store.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <thread>

#include "agent/meet/secured_meeting.h"
#include "lockstep/base/log.h"
#include "lockstep/base/process/host_name.h"
#include "lockstep/base/retry.h"
#include "lockstep/base/text.h"
#include "lockstep/collective/meet/store_client.h"
#include "lockstep/error.h"

namespace lockstep {
namespace {

constexpr milliseconds kResolveEvery{200};
constexpr milliseconds kLongestPauseOfJoin{20};
constexpr milliseconds kStrangerAnswersIn{1000};  // at a port that may be another program's

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
       .likely = in_use ? "another job, or an old one that is still running, uses this port"
                        : "MASTER_ADDR is not an address of the machine that runs rank 0",
       .next = in_use ? "choose another MASTER_PORT, or leave it out on one machine; ss -ltnp shows who has it"
                      : "set MASTER_ADDR to rank 0's machine on every rank"});
}

// False also if it has gone.
bool is_own_job(c10d::Store& store, const JobEnvironment& job) try {
  return store.check({"job"}) && text_in(store, "job") == name_of_job(job);
} catch (const std::exception&) {
  return false;
}

// One try at one of several ports: what another program or another job's rank 0 answers there is no error.
StorePtr find_at(SecuredJoin& join, const AddressList& addresses, const JobEnvironment& job, const Deadline& deadline,
                 milliseconds timeout) try {
  auto client = join.try_at(addresses, Deadline::after(std::min(kStrangerAnswersIn, deadline.left())));
  if (!client) return nullptr;
  auto store = c10::make_intrusive<MeetingStore>(std::move(client), timeout);
  return is_own_job(*store, job) ? store : nullptr;
} catch (const Error&) {
  return nullptr;
}

}  // namespace

std::string name_of_job(const JobEnvironment& job) {
  return concat(job.world_size, " ranks", job.job_name.empty() ? "" : " (" + job.job_name + ")");
}

AddressList resolve(const Endpoint& endpoint, const Deadline& deadline) {
  for (bool told = false;; told = true) {
    auto [failed, addresses] = look_up(endpoint, deadline);
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
  return c10::make_intrusive<MeetingStore>(serve_secured(std::move(listener), std::move(secret)), timeout);
}

StorePtr join_store(const Endpoint& endpoint, const JobEnvironment& job, SecretPtr secret, milliseconds timeout,
                    int ports) {
  const Deadline deadline = Deadline::after(timeout);
  const AddressList addresses = resolve(endpoint, deadline);
  const std::string who = concat("rank ", job.rank);
  const std::string place = ports == 1 ? endpoint.text() : concat(endpoint.text(), " to ", endpoint.port + ports - 1);
  SecuredJoin join(std::move(secret));
  const StorePtr store = retry(deadline, kLongestPauseOfJoin, [&]() -> StorePtr {
    if (ports == 1) {
      auto client = join.try_at(addresses, deadline);
      if (!client && join.is_hopeless()) throw join.error(who, place);
      return client ? c10::make_intrusive<MeetingStore>(std::move(client), timeout) : nullptr;
    }
    for (int port = endpoint.port; port < endpoint.port + ports; ++port) {
      set_port(addresses, port);
      if (auto found = find_at(join, addresses, job, deadline, timeout)) return found;
    }
    return nullptr;
  });
  if (!store) throw join.error(who, place);
  return store;
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
  const int64_t number = store.add(seat, 1);
  store.set(concat(seat, number), concat("pid ", ::getpid(), " on ", host_name()));
  if (number > 1) refuse(concat("another rank ", job.rank), text_in(store, seat + "1"));
}

void wait_for_everyone(c10d::Store& store, const std::string& where, const JobEnvironment& job,
                       const Deadline& deadline) {
  int64_t came = store.add("joined", 1);
  const auto all_came = [&] { return (came = store.add("joined", 0)) >= job.world_size; };
  if (job.rank != 0 || retry(deadline, kRetryEvery, all_came)) return;
  throw RendezvousError({.what = concat("only ", came, " of ", job.world_size, " ranks came"),
                         .here = concat("rank 0, waiting at ", where),
                         .likely = "a rank died before it got here, runs on another machine, or was refused",
                         .next = "look at the other ranks' output; on several machines set MASTER_ADDR"});
}

std::string text_in(c10d::Store& store, const std::string& key) try {
  return store.get_to_str(key);
} catch (const std::exception& error) {
  throw RendezvousError({.what = concat("no ", key, " in the store at MASTER_PORT: ", first_line_of(error)),
                         .likely = "the store of another program, or rank 0 died",
                         .next = "look at rank 0's output, or choose another MASTER_PORT"});
}

}  // namespace lockstep
