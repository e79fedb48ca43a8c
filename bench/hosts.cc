// SPDX-License-Identifier: Apache-2.0
// `lockstep bench hosts`: collectives between hosts, which are network namespaces with shaped links, beside flat Gloo.
#include <iostream>

#include "bench/benchmarks.h"
#include "bench/collectives/cases.h"
#include "bench/harness.h"
#include "bench/hosts/network.h"
#include "bench/hosts/systems.h"
#include "lockstep/base/text.h"
#include "lockstep/error.h"

namespace lockstep::bench {
namespace {

const std::vector<std::string> kOperations{"all_reduce", "reduce_scatter", "all_gather", "broadcast"};

struct HostsOptions {
  std::vector<int> hosts{2, 4};
  std::vector<int> ranks_per_host{2, 1};
  LinkOptions link;
  std::string algorithm = "direct";
  std::vector<std::string> operations = kOperations;
  std::vector<std::size_t> sizes{std::size_t{64} << 10, std::size_t{1} << 20, 25'000'000, 100'000'000};
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
  for (std::size_t i = 0; i < options.hosts.size(); ++i)
    setups.push_back({options.hosts[i], ranks.size() == 1 ? ranks.front() : ranks[i]});
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
  Turns ours{};
  Turns gloo{};
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
    for (const std::size_t bytes : options.sizes)
      results.push_back({.one = {.operation = operation, .bytes = bytes, .algorithm = options.algorithm},
                         .bound = share_sent(operation, setup.hosts) * static_cast<double>(bytes) / rate});
  return results;
}

Measured measure(const Program& program, const HostsOptions& options, const Setup& setup) {
  const Network network(setup.hosts, options.link);
  Measured all{.setup = setup, .rate = network.bytes_per_second(), .raw = measured_bytes_per_second(network)};
  all.results = cases_of(options, setup, all.rate);
  const RunningSystemPtr ours = start_hierarchy(network, setup.ranks_per_host);
  const RunningSystemPtr gloo = start_flat_gloo(network, setup.ranks_per_host);
  for (HostsResult& result : all.results) {
    const Case& one = result.one;
    program.take_turns(concat(setup.hosts, " hosts x ", setup.ranks_per_host, ": ", one.operation, " ", one.bytes),
                       [&](int) {
                         result.ours.push_back(ours->seconds(to_word(one)).value());
                         result.gloo.push_back(gloo->seconds(to_word(one)).value());
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
      {"operation", "bytes", "lockstep ms", "Gloo ms", "Gloo/ours", "of bound", "of raw bound", "Gloo of bound"});
  for (const HostsResult& result : all.results) {
    const double ours = median(result.ours);
    const double gloo = median(result.gloo);
    table.add({result.one.operation, with_thousands(static_cast<std::int64_t>(result.one.bytes)), milliseconds(ours),
               milliseconds(gloo), times(median_ratio(result.gloo, result.ours)), percent(result.bound / ours, 1),
               percent(result.bound * all.rate / all.raw / ours, 1), percent(result.bound / gloo, 1)});
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
                             {"ratio", median_ratio(result.gloo, result.ours)}});
  return json;
}

void print_head(const LinkOptions& link) {
  std::cout << machine() << ", TCP " << congestion_control(link)
            << "\nHosts are network namespaces on this machine. Each figure: the slowest rank, median over turns.\n"
               "bound: the least that must leave a host at the link's rate: all_reduce 2(n-1)/n*K, reduce_scatter and\n"
               "all_gather (n-1)/n*K, broadcast K; of raw bound: at the rate that one TCP stream gets through.\n";
}

void add_options(Program& program, HostsOptions& options) {
  program.list("--hosts", options.hosts, "numbers of hosts")->check(CLI::Range(2, 64));
  program.list("--ranks-per-host", options.ranks_per_host, "one for each of --hosts, or one for all")
      ->check(CLI::Range(1, 64));
  add_link_options(program, options.link);
  program.option("--algorithm", options.algorithm, "of lockstep's all_reduce between hosts: direct, ring")
      ->check(CLI::IsMember({"direct", "ring"}));
  program.list("--operation", options.operations, "only these")->check(CLI::IsMember(kOperations));
  program.list("--sizes", options.sizes, "bytes of float32 per rank; of all parts together");
}

}  // namespace

int bench_hosts(int argc, const char* const* argv) {
  HostsOptions options;
  Program program("hosts", "Collectives between hosts with shaped links, beside flat Gloo, in turn. Needs root.", 3);
  add_options(program, options);
  if (const auto exit_code = program.parse(argc, argv)) return *exit_code;
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
  return 0;
}

}  // namespace lockstep::bench
