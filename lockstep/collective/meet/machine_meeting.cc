// SPDX-License-Identifier: Apache-2.0
#include "lockstep/collective/meet/machine_meeting.h"

#include <sys/socket.h>
#include <unistd.h>

#include <memory>

#include "lockstep/base/hash.h"
#include "lockstep/base/retry.h"
#include "lockstep/base/sockets/local_socket.h"
#include "lockstep/base/sockets/port.h"
#include "lockstep/base/text.h"
#include "lockstep/collective/meet/job_store.h"
#include "lockstep/collective/meet/store_client.h"
#include "lockstep/error.h"

namespace lockstep {
namespace {

// Note [Meeting at a Unix socket]
// The ranks of a job know something in common that names the socket: the launcher, the scheduler's job, or MASTER_ADDR and
// MASTER_PORT, where nobody listens then. Rank 0 listens until all ranks have connected. Where another user has taken the
// name, it adds random numbers (docs/design/rendezvous.md), and the others pass over who belongs to another user.

std::string common_name(const JobEnvironment& job) {
  return concat(job.job_id, " ", job.job_name, " ", job.master_addr, " ", job.master_port);
}

// Ids may be longer than a socket's name, so a hash stands for them; require_own_job tells apart what it does not.
std::string name_of_socket(const JobEnvironment& job) {
  return concat("@lockstep-meeting-", ::geteuid(), "-", hash_of(common_name(job)));
}

std::string where(const JobEnvironment& job) {
  if (job.master_addr.empty()) return concat("job ", job.job_id);
  return Endpoint{job.master_addr, job.master_port}.text();
}

// A connection to a rank 0 of this user that listens there; none if nobody does.
UniqueFd try_to_connect(const std::string& name) {
  std::vector<std::string> names = local_listeners(name + "-");
  names.insert(names.begin(), name);
  for (const std::string& each : names) try {
      UniqueFd fd = connect_locally(each, SOCK_STREAM);
      if (is_own_user(fd.get())) return fd;
    } catch (const SystemError&) {  // nobody listens, or no more
    }
  return {};
}

[[noreturn]] void refuse_second(const JobEnvironment& job, const UniqueFd& first) {
  throw RendezvousError({.what = concat("another rank 0 waits for its job at ", where(job)),
                         .here = concat("rank 0 of ", job.world_size),
                         .peer = concat("pid ", peer_of(first.get()).value_or(ucred{}).pid),
                         .likely = "two jobs with one MASTER_PORT",
                         .next = "choose another MASTER_PORT, or wait until the other job has begun"});
}

UniqueFd listen_for(const JobEnvironment& job, const std::string& name) try {
  return listen_locally(name, SOCK_STREAM);
} catch (const SystemError&) {
  if (const UniqueFd first = try_to_connect(name)) refuse_second(job, first);
  return listen_locally(new_local_address(name + "-"), SOCK_STREAM);
}

std::unique_ptr<Channel> admit_own_user(UniqueFd fd) {
  return is_own_user(fd.get()) ? std::make_unique<Channel>(std::move(fd)) : nullptr;
}

MeetingClientPtr join_on_machine(const JobEnvironment& job, const Deadline& deadline) {
  const std::string name = name_of_socket(job);
  const auto client = retry(deadline, kRetryEvery, [&] {
    UniqueFd fd = try_to_connect(name);
    return fd ? MeetingClient::join(std::make_unique<Channel>(std::move(fd)), deadline) : nullptr;
  });
  if (client) return client;
  throw RendezvousError(
      {.what = concat("rank ", job.rank, " found no rank 0 of ", where(job), " on this machine"),
       .here = name,
       .likely = "rank 0 did not start, died early, runs on another machine or as another user",
       .next = "look at rank 0's output; on several machines set MASTER_ADDR and MASTER_PORT for all ranks"});
}

}  // namespace

bool is_on_one_machine(const JobEnvironment& job) {
  if (job.local_size != job.world_size) return false;
  return job.launcher != "address" || is_loopback(job.master_addr);  // by an address alone nobody knows
}

StorePtr meet_on_machine(const JobEnvironment& job, milliseconds timeout) {
  const Deadline deadline = Deadline::after(timeout);
  const auto client = job.rank == 0 ? MeetingClient::serve(listen_for(job, name_of_socket(job)), &admit_own_user)
                                    : join_on_machine(job, deadline);
  auto store = c10::make_intrusive<MeetingStore>(client, timeout);
  require_own_job(*store, where(job), job);
  wait_for_everyone(*store, where(job), job, deadline);
  client->stop_listening();
  return store;
}

}  // namespace lockstep
