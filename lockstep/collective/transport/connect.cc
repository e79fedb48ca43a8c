// SPDX-License-Identifier: Apache-2.0
#include "lockstep/collective/transport/connect.h"

#include <cstdlib>

#include "lockstep/base/files/file.h"
#include "lockstep/base/process/stop.h"
#include "lockstep/base/sockets/port.h"
#include "lockstep/base/text.h"
#include "lockstep/collective/machines/hierarchy.h"
#include "lockstep/collective/meet/connecting_store.h"
#include "lockstep/collective/meet/rendezvous.h"

namespace lockstep {
namespace {

// Returns the machine of each rank. Tells `lockstep top` that these ranks are one job.
std::vector<std::string> exchange_machines(ConnectingStore& store, const std::string& machine,
                                           const TransportOptions& options) {
  if (const JobEnvironment job = job_environment_or_none(); job.world_size > 1)
    observe::meets({job.rank, job.world_size, job.job_id, job.node_rank});
  std::vector<std::string> texts = exchange_texts(store, "machine", concat(machine, ' ', ::getpid()), options);
  observe::meets({.rank = options.rank, .world_size = options.size, .job = texts.front()});
  for (std::string& text : texts) text.resize(text.rfind(' '));
  return texts;
}

// Ranks that meet through a process group need no address: Slurm's and mpirun's variables count without one.
std::optional<std::string> variable_or_any_address(const std::string& name) {
  if (const char* value = std::getenv(name.c_str())) return value;
  if (std::getenv("RANK") != nullptr || std::getenv("WORLD_SIZE") != nullptr) return {};
  if (name == "MASTER_ADDR") return "process-group";
  return name == "MASTER_PORT" ? std::optional<std::string>("1") : std::nullopt;
}

}  // namespace

// On the machine of the store its host's name may be one of the loopback interface (Debian's /etc/hosts has 127.0.1.1 for
// a machine's own name). The others can't reach that: there the route to one of them tells the address.
std::string reachable_address(c10d::Store& store, const TransportOptions& options) {
  const std::string mine = address_towards_store(store, options.timeout);
  const auto all = exchange_texts(store, "interface", mine, options);
  const auto other = std::ranges::find_if_not(all, [](const std::string& address) { return is_loopback(address); });
  return is_loopback(mine) && other != all.end() ? address_towards(*other, options.timeout) : mine;
}

CpuConnection connect_cpu_ranks(const StorePtr& store, const std::string& machine, TransportOptions options) {
  const auto connecting = c10::make_intrusive<ConnectingStore>(store, options.rank);
  try {
    stop_together();
    const auto machine_of = number_by_first_appearance(exchange_machines(*connecting, machine, options));
    const Topology topology{machine_of};
    const auto here = topology.ranks_on(topology.machine_of[options.rank]);
    shm::GroupPtr inside = connect_shared_memory(*connecting, here, options);
    if (topology.machines() == 1) return {std::make_unique<CpuTransport>(std::move(inside)), machine_of};
    options.address = reachable_address(*connecting, options);
    return {std::make_unique<Hierarchy>(std::move(inside), topology, connecting, options), machine_of};
  } catch (const std::exception& error) {
    connecting->fail(options.describe, what_of(error));
    throw;
  }
}

JobEnvironment job_environment_or_none() {
  try {
    return read_job_environment(variable_or_any_address);
  } catch (const EnvironmentError&) {
    return {};
  }
}

std::string this_machine() {
  const std::string kernel = read_file("/proc/sys/kernel/random/boot_id");
  const JobEnvironment job = job_environment_or_none();
  if (job.launcher != "none") return concat(kernel, job.node_rank);
  const char* node = std::getenv("GROUP_RANK");
  return concat(kernel, node != nullptr ? node : "0");
}

}  // namespace lockstep
