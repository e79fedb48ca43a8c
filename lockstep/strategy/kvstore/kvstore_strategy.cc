#include "lockstep/strategy/kvstore/kvstore_strategy.h"

#include <algorithm>

#include "lockstep/base/text.h"
#include "lockstep/error.h"
#include "lockstep/strategy/kvstore/kvstore_dist.h"
#include "lockstep/strategy/kvstore/kvstore_worker.h"

namespace lockstep {
namespace {

void require(bool good, const std::string& what, const std::string& next) {
  if (!good) throw UsageError({.what = what, .next = next});
}

Consistency consistency_of(const std::string& kind) {
  if (kind == "dist_sync") return Consistency::kSync;
  return kind == "dist_async" ? Consistency::kAsync : Consistency::kBounded;
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
  const bool serves = options.serves.value_or(world.rank() < options.servers);
  const DistSetting setting{.world = world,
                            .roles = agree_on_roles(world, serves),
                            .consistency = consistency_of(options.kvstore),
                            .update_in_store = options.update_on_kvstore};
  check_clipping(options, setting.roles, setting.update_in_store);
  Links links = connect_links(world, setting.roles, patience_for(setting.consistency, options.timeout));
  const World peers = *world.split(serves ? 0 : 1);
  if (serves) return make_kvstore_server(setting, std::move(links), task, options);
  return make_kvstore_worker(setting, std::move(links.servers), peers, task, options);
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

std::unique_ptr<Strategy> make_kvstore(const World& world, const Task& task, const StrategyOptions& options) {
  check(options);
  return has_servers(options.kvstore) ? make_dist(world, task, options) : make_local_kvstore(world, task, options);
}

}  // namespace lockstep
