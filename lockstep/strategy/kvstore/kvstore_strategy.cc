#include "lockstep/strategy/kvstore/kvstore_strategy.h"

#include <algorithm>

#include "lockstep/base/text.h"
#include "lockstep/error.h"
#include "lockstep/strategy/kvstore/local_store.h"
#include "lockstep/strategy/kvstore/store_strategy.h"

namespace lockstep {
namespace {

void require(bool good, const std::string& what, const std::string& next) {
  if (!good) throw UsageError({.what = what, .next = next});
}

void check(const StrategyOptions& o) {
  require(std::ranges::find(kvstore_kinds(), o.kvstore) != kvstore_kinds().end(),
          concat("no such kvstore: ", o.kvstore), concat("one of ", join(kvstore_kinds(), ", ")));
  const bool exact = o.compression == "none";
  require(exact || (o.compression == "2bit" && has_servers(o.kvstore)),
          concat("--compression ", o.compression, " with kvstore ", o.kvstore), "none, or 2bit with a dist_ kvstore");
  require(exact || o.compression_amount >= 0, "a negative --compression-amount", "give the threshold, such as 0.5");
  require(o.update_on_kvstore || !goes_on_without_workers(o.kvstore),
          concat("kvstore ", o.kvstore, " updates on its servers"),
          "leave out --update-on-kvstore false, or choose dist_sync");
  require(o.staleness >= 0, concat("--staleness ", o.staleness), "give updates, 0 or more");
  require(o.split_above > 0, concat("--split-above ", o.split_above), "give elements, such as 1000000");
}

}  // namespace

const std::vector<std::string>& kvstore_kinds() {
  static const std::vector<std::string> kKinds = {
      "local",     "local_update_cpu", "local_allreduce_cpu", "local_allreduce_device",
      "dist_sync", "dist_async",       "dist_bounded"};
  return kKinds;
}

bool has_servers(const std::string& kind) { return kind.starts_with("dist_"); }
bool goes_on_without_workers(const std::string& kind) { return has_servers(kind) && kind != "dist_sync"; }

std::unique_ptr<Strategy> make_kvstore_strategy(const World& world, const Task& task, const StrategyOptions& options) {
  check(options);
  if (!has_servers(options.kvstore)) return make_local_strategy(world, task, options);
  const DistSetting setting = connect_store(world, options);
  const World peers = *world.split(setting.serves ? 0 : 1);
  return setting.serves ? make_server_strategy(setting, task, options)
                        : make_worker_strategy(setting, peers, task, options);
}

// A server by itself has no checkpoints to make: it has nothing to ask of the other servers.
std::unique_ptr<KVStore> make_kvstore(const World& world, const StrategyOptions& options, Devices* devices) {
  check(options);
  if (!has_servers(options.kvstore)) {
    require(world.size() == 1, concat("kvstore ", options.kvstore, " among ", world.size(), " ranks"),
            "one rank, or a dist_ kvstore");
    const bool on_device = options.kvstore == "local_allreduce_device" && devices != nullptr;
    return std::make_unique<LocalStore>(on_device ? SumOn::kDevice : SumOn::kCpu, devices);
  }
  const DistSetting setting = connect_store(world, options);
  if (!setting.serves)
    return std::make_unique<StoreClient>(setting.client_options(options), setting.links.servers, devices);
  for (const Link& server : setting.links.servers) server.send(RequestHeader{.request = Request::kGoodbye});
  StoreServer server(setting.server_options(options), setting.links.clients);
  server.wait_for_goodbyes();
  return nullptr;
}

}  // namespace lockstep
