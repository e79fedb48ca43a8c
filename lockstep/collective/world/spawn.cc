// SPDX-License-Identifier: Apache-2.0
#include "lockstep/spawn.h"

#include <ATen/Parallel.h>

#include "agent/start/launcher.h"
#include "lockstep/base/sockets/endpoint.h"
#include "lockstep/base/text.h"
#include "lockstep/collective/meet/rendezvous.h"
#include "lockstep/collective/transport/connect.h"
#include "lockstep/collective/world/world_state.h"

namespace lockstep {
namespace {

PeerLost lost_rank(const RankFailure& failure) {
  std::string lines = join(failure.last_lines, "\n          ");
  return PeerLost({.what = concat("rank ", failure.rank, " of spawn() ", how_it_ended(failure.end)),
                   .peer = concat("rank ", failure.rank, ", pid ", failure.pid),
                   .likely = lines.empty() ? "an exception, which that rank has printed" : std::move(lines),
                   .next = "repair what its last lines say"});
}

void require_rank_of(int rank, int size) {
  if (rank < 0 || rank >= size)
    throw UsageError({.what = concat("rank ", rank, " of ", size), .next = "give 0 <= rank < size"});
}

JobEnvironment job_at(const std::string& address) {
  const auto endpoint = endpoint_in(address);
  if (!endpoint || endpoint->port == 0)
    throw UsageError({.what = concat("the address ", address, " is not HOST:PORT"), .next = "such as 127.0.0.1:29500"});
  JobEnvironment job;
  job.master_addr = endpoint->host;
  job.master_port = endpoint->port;
  return job;
}

// Rank 0's process is like no other, and it makes one meeting after another.
std::string name_of_meeting() {
  static std::atomic<int> meetings{0};
  return concat(::getpid(), '-', start_time_of(::getpid()), '-', ++meetings);
}

}  // namespace

void spawn(int ranks, const std::function<void(World&)>& fn, const WorldOptions& options) {
  if (const JobEnvironment job = read_job_environment(); job.launcher != "none")
    throw UsageError({.what = "spawn() in a rank of a job",
                      .here = concat("rank ", job.rank, ", started by ", job.launcher),
                      .likely = "a program that starts its ranks itself was started by a launcher",
                      .next = "start it without one, or call World::from_env() in place of spawn()"});
  const auto rank_main = [&] {
    World world = World::from_env(options);
    at::set_num_threads(to_int(world.cores().size()));
    fn(world);
    return 0;
  };
  const LaunchResult result = launch({.ranks = ranks, .first_is_plain = true}, rank_main);
  if (result.failure) throw lost_rank(*result.failure);
  if (result.exit_code != 0) throw PeerLost({.what = concat("spawn() was ended by signal ", result.exit_code - 128)});
}

World connect_world(int rank, int size, const std::string& address, const WorldOptions& options) {
  require_rank_of(rank, size);
  JobEnvironment job = job_at(address);
  job.launcher = "address";
  job.rank = rank;
  job.world_size = size;
  job.local_size = size;  // who is on which machine turns out when they have met: a loopback address may be right
  if (size == 1) return World::single(options);
  return WorldState::over_store(connect_store(job, options.timeout), rank, size, options);
}

World connect_world(int rank, int size, const ExchangeTexts& exchange, const WorldOptions& options) {
  require_rank_of(rank, size);
  if (size == 1) return World::single(options);
  const auto machine_of = [](const std::string& text) { return text.substr(0, text.find(' ')); };
  const ExchangeTexts exchange_all = [&exchange, size](const std::string& mine) {
    std::vector<std::string> texts = exchange(mine);
    if (std::ssize(texts) == size) return texts;
    throw UsageError(
        {.what = concat("connect_world() of ", size, " ranks, and exchange() returned ", texts.size(), " texts"),
         .next = "return the text of every rank, in rank order"});
  };
  const std::vector<std::string> texts = exchange_all(concat(this_machine(), ' ', name_of_meeting()));
  JobEnvironment job;
  job.launcher = "exchange";
  job.rank = rank;
  job.world_size = size;
  job.job_id = texts.front();
  job.local_size =
      to_int(std::ranges::count_if(texts, [&](const auto& text) { return machine_of(text) == this_machine(); }));
  return WorldState::over_store(connect_store(job, exchange_all, options.timeout), rank, size, options);
}

}  // namespace lockstep
