#include "lockstep/strategy/kvstore/kvstore_strategy.h"

#include "lockstep/base/text.h"
#include "lockstep/error.h"
#include "lockstep/strategy/kvstore/kvstore_dist.h"
#include "lockstep/strategy/kvstore/kvstore_worker.h"
#include "lockstep/strategy/option_names.h"

namespace lockstep {
namespace {

void require(bool good, const std::string& what, const std::string& next) {
  if (!good) throw UsageError({.what = what, .next = next});
}

Consistency consistency_of(KVStoreKind kind) {
  if (kind == KVStoreKind::kDistSync) return Consistency::kSync;
  return kind == KVStoreKind::kDistAsync ? Consistency::kAsync : Consistency::kBounded;
}

void check(const StrategyOptions& o) {
  const bool exact = o.compression.kind == Compression::kNone;
  const std::string kind = name_of(o.kvstore.kind);
  require(exact || (o.compression.kind == Compression::kTwoBit && has_servers(o.kvstore.kind)),
          concat("--compression ", name_of(o.compression.kind), " with kvstore ", kind),
          "none, or 2bit with a dist_ kvstore");
  require(exact || o.compression.amount >= 0, "a negative --compression-amount", "give the threshold, such as 0.5");
  require(o.kvstore.update_on_kvstore || !goes_on_without_workers(o.kvstore.kind),
          concat("kvstore ", kind, " updates on its servers"),
          "leave out --update-on-kvstore false, or choose dist_sync");
  require(o.kvstore.staleness >= 0, concat("--staleness ", o.kvstore.staleness), "give updates, 0 or more");
  require(o.kvstore.split_above > 0, concat("--split-above ", o.kvstore.split_above), "give elements, such as 1000000");
}

// A server knows its slices only.
void check_clipping(const StrategyOptions& o, const Roles& roles, bool update_in_store) {
  require(o.clipping.max_norm == 0 || roles.servers.size() == 1 || !update_in_store,
          "--clip-norm where several servers update: none of them knows the norm of all gradients",
          "take one server, or dist_sync with --update-on-kvstore false");
}

// Workers in step wait for each other too: they are the first to find out who is lost, and tell the servers.
LinkPatience patience_for(Consistency consistency, std::chrono::milliseconds timeout) {
  return {.of_servers = consistency == Consistency::kSync ? 2 * timeout : timeout, .of_clients = 3 * timeout};
}

std::unique_ptr<Strategy> make_dist(const World& world, const Task& task, const StrategyOptions& options) {
  const bool serves = options.kvstore.serves.value_or(world.rank() < options.kvstore.servers);
  const DistSetting setting{.world = world,
                            .roles = agree_on_roles(world, serves),
                            .consistency = consistency_of(options.kvstore.kind),
                            .update_in_store = options.kvstore.update_on_kvstore};
  check_clipping(options, setting.roles, setting.update_in_store);
  Links links = connect_links(world, setting.roles, patience_for(setting.consistency, options.timeout));
  const World peers = *world.split(serves ? 0 : 1);
  if (serves) return make_kvstore_server(setting, std::move(links), task, options);
  return make_kvstore_worker(setting, std::move(links.servers), peers, task, options);
}

}  // namespace

bool has_servers(KVStoreKind kind) { return kind >= KVStoreKind::kDistSync; }
bool goes_on_without_workers(KVStoreKind kind) { return kind > KVStoreKind::kDistSync; }

std::unique_ptr<Strategy> make_kvstore(const World& world, const Task& task, const StrategyOptions& options) {
  check(options);
  return has_servers(options.kvstore.kind) ? make_dist(world, task, options) : make_local_kvstore(world, task, options);
}

}  // namespace lockstep
