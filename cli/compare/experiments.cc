// SPDX-License-Identifier: Apache-2.0
#include "cli/compare/experiments.h"

#include "lockstep/base/names.h"

namespace lockstep::compare {
namespace {

// Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms" (2009): the least there is.
double all_reduced(int workers, int) { return 2.0 * (workers - 1) / workers; }

// Li et al., "Scaling distributed machine learning with the parameter server" (OSDI 2014): each worker sends its gradient
// and receives the weights; a server has its share of the keys. With more servers than workers a worker's own link is the
// busiest.
double served(int workers, int servers) { return std::max(1.0, static_cast<double>(workers) / servers); }

Contender kvstore(const std::string& kind) {
  return {.name = "kvstore-" + kind, .strategy = "kvstore", .options = {{"kvstore", kind}}};
}

Contender servers(int count, const std::string& formula) {
  return {.name = concat("servers-", count),
          .strategy = "kvstore",
          .options = {{"kvstore", "dist_sync"}, {"servers", concat(count)}, {"split-above", "10000"}},
          .servers = count,
          .busiest = served,
          .formula = formula};
}

const std::vector<std::string>& kvstore_kinds() {
  static const Words kinds{"local",     "local_update_cpu", "local_allreduce_cpu", "local_allreduce_device",
                           "dist_sync", "dist_async",       "dist_bounded"};
  return kinds;
}

std::vector<Case> plain(const Words& names) {
  std::vector<Case> cases;
  for (const std::string& name : names) cases.push_back({name, {}});
  return cases;
}

std::vector<Case> kinds_of_two_models() {
  const Varied models{"model", {"inception", "alexnet"}};
  std::vector<Case> cases{{"single", {models}}};
  for (const std::string& kind : kvstore_kinds()) cases.push_back({"kvstore-" + kind, {models}});
  return cases;
}

const Words kAllStrategies{
    "single",    "ddp",       "towers", "data_parallel", "kvstore-local", "kvstore-dist_sync", "kvstore-dist_async",
    "averaging", "pipeline-2"};

template <class Table>
const typename Table::value_type& row_named(const Table& table, const std::string& name, const std::string& what) {
  const auto found = std::ranges::find(table, name, &Table::value_type::name);
  if (found != table.end()) return *found;
  throw UsageError({.what = concat("lockstep compare knows no ", what, " '", name, "'"),
                    .next = concat("give one of ", join(names_in(table), ", "))});
}

}  // namespace

const std::vector<Contender>& contenders() {
  static const std::vector<Contender> all = [] {
    std::vector<Contender> rows{
        {.name = "single", .strategy = "single", .most_devices = 1},
        {.name = "ddp", .strategy = "ddp", .busiest = all_reduced, .formula = "2(N-1)/N * K"},
        {.name = "ddp-ring",
         .strategy = "ddp",
         .options = {{"algorithm", "ring"}},
         .busiest = all_reduced,
         .formula = "2(N-1)/N * K"},
        {.name = "towers", .strategy = "towers"},
        {.name = "data_parallel", .strategy = "data_parallel"},
        {.name = "averaging", .strategy = "averaging"},
        {.name = "pipeline", .strategy = "pipeline"},                                  // as many stages as devices
        {.name = "pipeline-2", .strategy = "pipeline", .options = {{"stages", "2"}}},  // and copies of it
        servers(1, "N * K"),
        servers(2, "max(1, N/2) * K"),
        servers(4, "max(1, N/4) * K")};
    for (const std::string& kind : kvstore_kinds()) rows.push_back(kvstore(kind));
    return rows;
  }();
  return all;
}

const std::vector<Experiment>& experiments() {
  static const std::vector<Experiment> all{
      {.name = "strategies",
       .description = "all strategies on one device and on all cores (what is compared without EXPERIMENT)",
       .cases = plain(kAllStrategies)},
      {.name = "scaling",
       .description = "every strategy on 1, 2, 3 ... devices",
       .cases = plain(kAllStrategies),
       .counts = DeviceCounts::kUpToAll},
      {.name = "server-vs-ring",
       .description = "parameter servers against rings, over hosts with slow links; as root: in network namespaces",
       .cases = plain({"ddp", "ddp-ring", "servers-1", "servers-2", "servers-4"}),
       .devices = {1, 2, 3, 4, 5, 6, 7, 8},
       .model = "mlp",
       .data = "synthetic",
       .batch_per_device = 4,
       .budget = {.steps = 11},
       .over_hosts = true},
      {.name = "batch-and-rate",
       .description = "how the learning rate grows with the batch",
       .across = "batch_size",
       .cases = {{"ddp", {{"batch-size", {"64", "256", "1024", "4096"}}, {"lr-scaling", {"none", "sqrt", "linear"}}}}}},
      {.name = "average-every",
       .description = "averaging after every h batches",
       .across = "average_every",
       .cases = {{"single", {}}, {"averaging", {{"average-every", {"1", "2", "4", "8", "16", "32", "64"}}}}}},
      {.name = "staleness",
       .description = "servers that let gradients be late, by at most s updates",
       .across = "staleness",
       .cases = {{"single", {}},
                 {"kvstore-dist_sync", {}},
                 {"kvstore-dist_bounded", {{"staleness", {"0", "1", "2", "4", "8"}}}},
                 {"kvstore-dist_async", {}}}},
      {.name = "bubble",
       .description = "pipelines: stages x micro-batches, ResNet-50 in up to 10",
       .across = "micro_batches",
       .cases = {{"single", {}}, {"pipeline", {{"micro-batches", {"1", "2", "4", "8", "16"}}}}},
       .devices = {2, 5, 10},
       .model = "resnet50",
       .data = "synthetic",
       .batch_size = 16,
       .budget = {.steps = 5}},
      {.name = "kvstore-kinds",
       .description = "every kind of kvstore, with small weights (Inception) and large ones (AlexNet)",
       .across = "contender",
       .cases = kinds_of_two_models(),
       .data = "synthetic",
       .batch_size = 8,
       .budget = {.steps = 8}},
  };
  return all;
}

const Contender& contender_named(const std::string& name) { return row_named(contenders(), name, "strategy"); }
const Experiment& experiment_named(const std::string& name) { return row_named(experiments(), name, "experiment"); }

}  // namespace lockstep::compare
