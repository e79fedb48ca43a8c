// SPDX-License-Identifier: Apache-2.0
#include "lockstep/launch/arbiter.h"

#include <algorithm>

#include "lockstep/base/text.h"
#include "lockstep/error.h"
#include "lockstep/launch/slurm_arbiter.h"

namespace lockstep {

std::shared_ptr<Arbiter> make_arbiter(const std::string& name) {
  constexpr int kPortOfEtcd = 2379;
  if (name.empty()) return nullptr;
  if (name == "slurm") return std::make_shared<SlurmArbiter>();
  std::vector<Endpoint> servers;
  if (name.starts_with("etcd:"))
    for (const std::string& text : split(name.substr(5), ',')) {
      const std::size_t colon = std::min(text.rfind(':'), text.size());
      Endpoint server{text.substr(0, colon), kPortOfEtcd};
      if (server.host.empty() || (colon < text.size() && !parse_int(text.substr(colon + 1), server.port))) {
        servers.clear();
        break;
      }
      servers.push_back(std::move(server));
    }
  if (servers.empty())
    throw UsageError({.what = concat("--arbiter is '", name, "'"), .next = "give etcd:HOST:PORT, or slurm"});
  return etcd_arbiter(std::move(servers));
}

}  // namespace lockstep
