// SPDX-License-Identifier: Apache-2.0
// `lockstep bench hosts`: collectives between hosts, which are network namespaces with shaped links, beside flat Gloo.
#include <iostream>

#include <ATen/Parallel.h>

#include "bench/collectives/cases.h"
#include "bench/collectives/systems.h"
#include "bench/harness.h"
#include "bench/network.h"
#include "lockstep/base/names.h"
#include "lockstep/base/text.h"
#include "lockstep/collective/calls/collective_names.h"
#include "lockstep/error.h"
#include "lockstep/world.h"
#include "tools/plan/measured_steps.h"

namespace lockstep::bench {
namespace {

// ---- what is compared, each with ranks on every host of a network

class WorldRank final : public System {
 public:
  explicit WorldRank(World world) : world_(std::move(world)) {}

  int rank() const override { return world_.rank(); }
  void barrier() override { world_.barrier(); }
  double slowest(double seconds) override { return plan::largest_of(world_, seconds); }
  std::function<void()> prepare(const Case& one) override;

 private:
  at::Tensor array(int64_t elements) const { return world_.allocate({elements}, at::kFloat).zero_(); }

  World world_;
};

// As World::allocate gives it: where lockstep's buckets lie.
std::function<void()> WorldRank::prepare(const Case& one) {
  const auto part = static_cast<int64_t>(one.part(world_.size()));
  const at::Tensor data = array(static_cast<int64_t>(one.count()));
  const Algorithm algorithm = value_named<Algorithm>(one.algorithm, "algorithm");
  if (one.operation == "all_reduce") return [=, this] { world_.all_reduce(data, {.algorithm = algorithm}); };
  if (one.operation == "broadcast") return [=, this] { world_.broadcast(data); };
  const at::Tensor own = array(part);
  const at::Tensor all = array(part * world_.size());
  if (one.operation == "reduce_scatter")
    return [=, this] { static_cast<void>(world_.reduce_scatter(all, {.output = own})); };
  const at::Tensor table = all.view({world_.size(), part});
  if (one.operation == "all_gather") return [=, this] { static_cast<void>(world_.all_gather(own, {.output = table})); };
  return nullptr;
}

using MakeRank = std::function<std::unique_ptr<System>(int rank, int host, const std::string& address)>;

RunningSystemPtr start(const std::string& name, const Network& network, int ranks_per_host, const MakeRank& make,
                       const Variables& variables = {}) {
  const int ranks = network.hosts() * ranks_per_host;
  return std::make_unique<RunningSystem>(name, ranks, ranks, [&](int rank, const std::string& address) {
    const int host = rank / ranks_per_host;
    const auto body = [=, &network] {
      network.host(host).enter();
      at::set_num_threads(1);
      serve(*make(rank, host, address), address);
      return 0;
    };
    Variables all = network.variables(host, rank % ranks_per_host, ranks_per_host);
    all.insert(all.end(), variables.begin(), variables.end());
    return ProcessOptions{.body = body, .variables = all};
  });
}

// World's collectives: shared memory inside a host, the hierarchy between hosts.
RunningSystemPtr start_hierarchy(const Network& network, int ranks_per_host, bool encrypted) {
  return start(encrypted ? "lockstep, encrypted" : "lockstep", network, ranks_per_host,
               [](auto&&...) { return std::make_unique<WorldRank>(World::from_env()); },
               {{"LOCKSTEP_INSECURE_NETWORK", encrypted ? "0" : "1"}, {"MASTER_PORT", encrypted ? "29501" : "29500"}});
}

// c10d's Gloo between all ranks, as PyTorch uses it on CPUs.
RunningSystemPtr start_flat_gloo(const Network& network, int ranks_per_host) {
  const int size = network.hosts() * ranks_per_host;
  return start("Gloo", network, ranks_per_host, [&](int rank, int host, const std::string& address) {
    return make_gloo_rank({.store = address + ".store", .rank = rank, .size = size, .address = network.address(host)});
  });
}

// ---- the comparison

const std::vector<std::string> kOperations{"all_reduce", "reduce_scatter", "all_gather", "broadcast"};

struct HostsOptions {
  std::vector<int> hosts{2, 4};
  std::vector<int> ranks_per_host{2, 1};
  LinkOptions link;
  std::string algorithm = "fastest";
  std::vector<std::string> operations = kOperations;
  std::vector<size_t> sizes{size_t{64} << 10, size_t{1} << 20, 25'000'000, 100'000'000};
};

struct Setup {
  int hosts;
  int ranks_per_host;
};

std::vector<Setup> setups_of(const HostsOptions& options) {
  const auto& ranks = options.ranks_per_host;
  if (ranks.size() != 1 && ranks.size() != options.hosts.size())
    throw UsageError(
        {.what = concat(options.hosts.size(), " numbers of hosts and ", ranks.size(), " of ranks per host"),
         .next = "give one --ranks-per-host for each of --hosts, or one for all"});
  std::vector<Setup> setups;
  for (const int hosts : options.hosts) setups.push_back({hosts, ranks[ranks.size() == 1 ? 0 : setups.size()]});
  return setups;
}

// The least that must leave (or reach) the busiest host, as a share of the case's bytes: sent by each of n hosts.
double share_sent(const std::string& operation, int hosts) {
  const double others = static_cast<double>(hosts - 1) / hosts;
  if (operation == "all_reduce") return 2 * others;
  return operation == "broadcast" ? 1 : others;
}

struct HostsResult {
  Case one;
  Turns ours{}, encrypted{}, gloo{};
  double bound = 0;  // seconds, at the nominal rate
};

struct Measured {
  Setup setup;
  double rate = 0;  // bytes per second and direction: nominal
  double raw = 0;   // what TCP gets through, before and after the rest: the better
  std::vector<HostsResult> results{};
};

std::vector<HostsResult> cases_of(const HostsOptions& options, const Setup& setup, double rate) {
  std::vector<HostsResult> results;
  for (const std::string& operation : options.operations)
    for (const size_t bytes : options.sizes)
      results.push_back({.one = {.operation = operation, .bytes = bytes, .algorithm = options.algorithm},
                         .bound = share_sent(operation, setup.hosts) * static_cast<double>(bytes) / rate});
  return results;
}

Measured measure(const Program& program, const HostsOptions& options, const Setup& setup) {
  const Network network(setup.hosts, options.link);
  Measured all{.setup = setup, .rate = network.bytes_per_second(), .raw = measured_bytes_per_second(network)};
  all.results = cases_of(options, setup, all.rate);
  const RunningSystemPtr ours = start_hierarchy(network, setup.ranks_per_host, false);
  const RunningSystemPtr encrypted = start_hierarchy(network, setup.ranks_per_host, true);
  const RunningSystemPtr gloo = start_flat_gloo(network, setup.ranks_per_host);
  for (HostsResult& result : all.results) {
    const Case& one = result.one;
    program.take_turns(concat(setup.hosts, " hosts x ", setup.ranks_per_host, ": ", one.operation, " ", one.bytes),
                       [&](int) {
                         result.ours.push_back(ours->seconds(to_word(one)).value());
                         result.gloo.push_back(gloo->seconds(to_word(one)).value());
                         result.encrypted.push_back(encrypted->seconds(to_word(one)).value());
                       });
  }
  all.raw = std::max(all.raw, measured_bytes_per_second(network));
  return all;
}

void print(const Measured& all, std::ostream& out) {
  out << '\n'
      << all.setup.hosts << " hosts x " << all.setup.ranks_per_host << " ranks, links of "
      << fixed(all.rate * 8 / 1e6, 0) << " Mb/s; raw TCP gets " << percent(all.raw / all.rate, 1)
      << " of that through\n";
  Table table(
      {"operation", "bytes", "lockstep ms", "Gloo ms", "Gloo/ours", "of bound", "Gloo of bound", "encrypted ms"});
  for (const HostsResult& result : all.results) {
    const double ours = median(result.ours);
    const double gloo = median(result.gloo);
    table.add({result.one.operation, with_thousands(static_cast<int64_t>(result.one.bytes)), milliseconds(ours),
               milliseconds(gloo), times(median_ratio(result.gloo, result.ours)), percent(result.bound / ours, 1),
               percent(result.bound / gloo, 1), milliseconds(median(result.encrypted))});
  }
  table.print(out);
}

Json to_json(const Measured& all) {
  Json json{{"hosts", all.setup.hosts},
            {"ranks_per_host", all.setup.ranks_per_host},
            {"bytes_per_second", all.rate},
            {"raw_bytes_per_second", all.raw}};
  for (const HostsResult& result : all.results)
    json["cases"].push_back({{"operation", result.one.operation},
                             {"bytes", result.one.bytes},
                             {"bound", result.bound},
                             {"lockstep", bench::to_json(result.ours)},
                             {"gloo", bench::to_json(result.gloo)},
                             {"encrypted", bench::to_json(result.encrypted)},
                             {"ratio", median_ratio(result.gloo, result.ours)}});
  return json;
}

void print_head(const LinkOptions& link) {
  std::cout << machine() << ", TCP " << congestion_control(link)
            << "\nHosts are network namespaces on this machine. Each figure: the slowest rank, median over turns.\n"
               "bound: the least that must leave a host at the link's rate: all_reduce 2(n-1)/n*K, reduce_scatter and\n"
               "all_gather (n-1)/n*K, broadcast K. Both systems send in clear; encrypted: lockstep's default.\n";
}

void add_options(Program& program, HostsOptions& options) {
  program.list("--hosts", options.hosts, "numbers of hosts")->check(CLI::Range(2, 64));
  program.list("--ranks-per-host", options.ranks_per_host, "one for each of --hosts, or one for all")
      ->check(CLI::Range(1, 64));
  add_link_options(program, options.link);
  program.option("--algorithm", options.algorithm, "of lockstep's all_reduce between hosts: fastest, direct, ring")
      ->check(CLI::IsMember({"fastest", "direct", "ring"}));
  program.list("--operation", options.operations, "only these")->check(CLI::IsMember(kOperations));
  program.list("--sizes", options.sizes, "bytes of float32 per rank; of all parts together");
}

void run(const Program& program, const HostsOptions& options) {
  print_head(options.link);
  Json json{{"turns", program.turns()},
            {"congestion_control", congestion_control(options.link)},
            {"algorithm", options.algorithm}};
  for (const Setup& setup : setups_of(options)) {
    const Measured all = measure(program, options, setup);
    print(all, std::cout);
    json["setups"].push_back(to_json(all));
  }
  program.save(json);
}

}  // namespace

int bench_hosts(int argc, const char* const* argv) {
  HostsOptions options;
  Program program("hosts", "Collectives between hosts with shaped links, beside flat Gloo, in turn. Needs root.", 3);
  add_options(program, options);
  return program.run(argc, argv, [&] { run(program, options); });
}

}  // namespace lockstep::bench
