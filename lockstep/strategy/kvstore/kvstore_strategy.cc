// SPDX-License-Identifier: Apache-2.0
#include "lockstep/strategy/kvstore/kvstore_strategy.h"

#include <limits>

#include "lockstep/base/text.h"
#include "lockstep/error.h"
#include "lockstep/strategy/kvstore/client.h"
#include "lockstep/strategy/kvstore/local_store.h"
#include "lockstep/strategy/kvstore/server.h"
#include "lockstep/strategy/kvstore/store_strategy.h"
#include "lockstep/strategy/option_names.h"

namespace lockstep {
namespace {

void require(bool good, const std::string& what, const std::string& next) {
  if (!good) throw UsageError({.what = what, .next = next});
}

void check(const StrategyOptions& options) {
  const KVStoreOptions& store = options.kvstore;
  const CompressionOptions& compression = options.compression;
  const std::string kind = name_of(store.kind);
  const bool exact = compression.kind == Compression::kNone;
  require(exact || (compression.kind == Compression::kTwoBit && has_servers(store.kind)),
          concat("--compression ", name_of(compression.kind), " with kvstore ", kind),
          "none, or 2bit with a dist_ kvstore");
  require(exact || compression.amount >= 0, "a negative --compression-amount", "give the threshold, such as 0.5");
  require(store.update_on_kvstore || !goes_on_without_workers(store.kind),
          concat("kvstore ", kind, " updates on its servers"),
          "leave out --update-on-kvstore false, or choose dist_sync");
  require(store.staleness >= 0, concat("--staleness ", store.staleness), "give updates, 0 or more");
  require(store.split_above > 0, concat("--split-above ", store.split_above), "give elements, such as 1000000");
}

}  // namespace

bool has_servers(KVStoreKind kind) { return kind >= KVStoreKind::kDistSync; }
bool goes_on_without_workers(KVStoreKind kind) { return kind > KVStoreKind::kDistSync; }

// A layerwise rule takes norms over whole keys, which a server that has only a part of a key does not know.
std::unique_ptr<Strategy> make_kvstore_strategy(const World& world, const Task& task, const StrategyOptions& options) {
  check(options);
  if (!has_servers(options.kvstore.kind)) return make_local_strategy(world, task, options);
  StrategyOptions known = options;
  if (layerwise(options.optimizer)) known.kvstore.split_above = std::numeric_limits<std::int64_t>::max();
  const DistSetting setting = connect_store(world, known);
  const World peers = *world.split(setting.serves() ? 0 : 1);
  return setting.serves() ? make_server_strategy(setting, task) : make_worker_strategy(setting, peers, task);
}

// A server by itself has no checkpoints to make: it has nothing to ask of the other servers.
std::unique_ptr<KVStore> make_kvstore(const World& world, const StrategyOptions& options, Devices* devices) {
  check(options);
  if (!has_servers(options.kvstore.kind)) {
    require(world.size() == 1, concat("kvstore ", name_of(options.kvstore.kind), " among ", world.size(), " ranks"),
            "one rank, or a dist_ kvstore");
    const bool on_device = options.kvstore.kind == KVStoreKind::kLocalAllReduceDevice && devices != nullptr;
    return std::make_unique<LocalStore>(on_device ? SumOn::kDevice : SumOn::kCpu, devices);
  }
  const DistSetting setting = connect_store(world, options);
  if (!setting.serves()) return std::make_unique<StoreClient>(setting, devices);
  for (const Link& server : setting.to_servers) server.send(RequestHeader{.request = Request::kGoodbye});
  StoreServer server(setting);
  server.wait_for_goodbyes();
  return nullptr;
}

}  // namespace lockstep
