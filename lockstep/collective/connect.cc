// SPDX-License-Identifier: Apache-2.0
#include "lockstep/collective/connect.h"

#include <algorithm>
#include <map>

#include "lockstep/base/file.h"
#include "lockstep/base/stop.h"
#include "lockstep/base/text.h"
#include "lockstep/collective/machines/hierarchy.h"
#include "lockstep/collective/rendezvous.h"
#include "lockstep/collective/shared_memory_transport.h"

namespace lockstep {
namespace {

std::vector<int> number_by_first_appearance(const std::vector<std::string>& names) {
  std::map<std::string, int> known;
  std::vector<int> numbers;
  for (const std::string& name : names)
    numbers.push_back(known.try_emplace(name, static_cast<int>(known.size())).first->second);
  return numbers;
}

bool is_loopback(const std::string& address) { return address == "::1" || address.starts_with("127."); }

}  // namespace

// On the machine of the store its host's name may be one of the loopback interface (Debian's /etc/hosts has 127.0.1.1 for
// a machine's own name). The others can't reach that: there the route to one of them tells the address.
std::string reachable_address(c10d::Store& store, const TransportOptions& options) {
  const std::string mine = address_towards_store(store, options.timeout);
  const auto all = exchange_texts(store, "interface", mine, options);
  const auto other = std::ranges::find_if_not(all, is_loopback);
  return is_loopback(mine) && other != all.end() ? address_towards(*other, options.timeout) : mine;
}

CpuConnection connect_cpu_ranks(const c10::intrusive_ptr<c10d::Store>& store, const std::string& machine,
                                TransportOptions options) {
  stop_together();
  const auto machine_of = number_by_first_appearance(exchange_texts(*store, "machine", machine, options));
  const Topology topology{machine_of};
  const auto here = topology.ranks_on(topology.machine_of[options.rank]);
  shm::Group inside = connect_shared_memory(*store, here, options);
  if (topology.machines() == 1) return {std::make_unique<SharedMemoryTransport>(std::move(inside)), machine_of};
  options.address = reachable_address(*store, options);
  return {std::make_unique<Hierarchy>(std::move(inside), topology, store, options), machine_of};
}

std::string machine_id(const std::string& node) { return concat(read_file("/proc/sys/kernel/random/boot_id"), node); }

}  // namespace lockstep
