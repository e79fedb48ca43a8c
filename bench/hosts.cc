// `lockstep bench hosts`: collectives between hosts, which are network namespaces with shaped links, beside flat Gloo.
#include <iostream>
#include <map>

#include "bench/benchmarks.h"
#include "bench/collectives/cases.h"
#include "bench/command_line.h"
#include "bench/hosts/link_options.h"
#include "bench/hosts/network.h"
#include "bench/hosts/systems.h"
#include "bench/report.h"
#include "lockstep/base/text.h"
#include "lockstep/error.h"

namespace lockstep::bench {
namespace {

const std::vector<std::string> kOperations{"all_reduce", "reduce_scatter", "all_gather", "broadcast"};

struct Options {
  std::vector<int> hosts{2, 4};
  std::vector<int> ranks_per_host{2, 1};
  LinkOptions link;
  std::string algorithm = "direct";
  std::vector<std::string> operations = kOperations;
  std::vector<std::size_t> sizes{std::size_t{64} << 10, std::size_t{1} << 20, 25'000'000, 100'000'000};
  int turns = 3;
  std::string json;
};

struct Setup {
  int hosts;
  int ranks_per_host;
};

std::vector<Setup> setups_of(const Options& options) {
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

struct Result {
  Case one;
  std::vector<double> ours{};
  std::vector<double> gloo{};
  double bound = 0;  // seconds, at the nominal rate
};

struct Measured {
  Setup setup;
  double rate = 0;  // bytes per second and direction: nominal
  double raw = 0;   // what TCP gets through, before and after the rest: the better
  std::vector<Result> results{};
};

std::vector<Result> cases_of(const Options& options, const Setup& setup, double rate) {
  std::vector<Result> results;
  for (const std::string& operation : options.operations)
    for (const std::size_t bytes : options.sizes)
      results.push_back({.one = {.operation = operation, .bytes = bytes, .algorithm = options.algorithm},
                         .bound = share_sent(operation, setup.hosts) * static_cast<double>(bytes) / rate});
  return results;
}

void progress(const Setup& setup, const Case& one) {
  std::cerr << "\r" << setup.hosts << " hosts x " << setup.ranks_per_host << ": " << one.operation << ' ' << one.bytes
            << "              " << std::flush;
}

// Both systems in turn at every case: what changes meanwhile on the machine meets both.
Measured measure(const Options& options, const Setup& setup) {
  const Network network(setup.hosts, options.link);
  Measured all{.setup = setup, .rate = network.bytes_per_second(), .raw = measured_bytes_per_second(network)};
  all.results = cases_of(options, setup, all.rate);
  const RunningSystemPtr ours = start_hierarchy(network, setup.ranks_per_host);
  const RunningSystemPtr gloo = start_flat_gloo(network, setup.ranks_per_host);
  for (Result& result : all.results) {
    progress(setup, result.one);
    for (int turn = 0; turn < options.turns; ++turn) {
      result.ours.push_back(ours->seconds(to_word(result.one)).value());
      result.gloo.push_back(gloo->seconds(to_word(result.one)).value());
    }
  }
  all.raw = std::max(all.raw, measured_bytes_per_second(network));
  std::cerr << "\r" << std::string(60, ' ') << "\r";
  return all;
}

// The median of how many times as long as `ours` it took, turn by turn.
double ratio(const Result& result) {
  std::vector<double> ratios;
  for (std::size_t turn = 0; turn < result.ours.size(); ++turn) ratios.push_back(result.gloo[turn] / result.ours[turn]);
  return median(ratios);
}

std::string percent(double share) { return concat(fixed(100 * share, 1), "%"); }
std::string milliseconds(double seconds) { return fixed(seconds * 1e3, 2); }

void print(const Measured& all, std::ostream& out) {
  out << '\n'
      << all.setup.hosts << " hosts x " << all.setup.ranks_per_host << " ranks, links of "
      << fixed(all.rate * 8 / 1e6, 0) << " Mb/s; raw TCP gets " << percent(all.raw / all.rate) << " of that through\n";
  Table table(
      {"operation", "bytes", "lockstep ms", "Gloo ms", "Gloo/ours", "of bound", "of raw bound", "Gloo of bound"});
  for (const Result& result : all.results) {
    const double ours = median(result.ours);
    const double gloo = median(result.gloo);
    table.add({result.one.operation, with_thousands(static_cast<std::int64_t>(result.one.bytes)), milliseconds(ours),
               milliseconds(gloo), concat(fixed(ratio(result), 2), "x"), percent(result.bound / ours),
               percent(result.bound * all.rate / all.raw / ours), percent(result.bound / gloo)});
  }
  table.print(out);
}

nlohmann::ordered_json to_json(const Measured& all) {
  nlohmann::ordered_json json{{"hosts", all.setup.hosts},
                              {"ranks_per_host", all.setup.ranks_per_host},
                              {"bytes_per_second", all.rate},
                              {"raw_bytes_per_second", all.raw}};
  for (const Result& result : all.results)
    json["cases"].push_back({{"operation", result.one.operation},
                             {"bytes", result.one.bytes},
                             {"bound", result.bound},
                             {"lockstep", {{"median", median(result.ours)}, {"turns", result.ours}}},
                             {"gloo", {{"median", median(result.gloo)}, {"turns", result.gloo}}},
                             {"ratio", ratio(result)}});
  return json;
}

void print_head(const LinkOptions& link) {
  std::cout << machine() << ", TCP " << congestion_control(link)
            << "\nHosts are network namespaces on this machine. Each figure: the slowest rank, median over turns.\n"
               "bound: the least that must leave a host at the link's rate: all_reduce 2(n-1)/n*K, reduce_scatter and\n"
               "all_gather (n-1)/n*K, broadcast K; of raw bound: at the rate that one TCP stream gets through.\n";
}

void add_options(CLI::App& app, Options& options) {
  app.add_option("--hosts", options.hosts, "numbers of hosts")
      ->delimiter(',')
      ->check(CLI::Range(2, 64))
      ->capture_default_str();
  app.add_option("--ranks-per-host", options.ranks_per_host, "one for each of --hosts, or one for all")
      ->delimiter(',')
      ->check(CLI::Range(1, 64))
      ->capture_default_str();
  add_link_options(app, options.link);
  app.add_option("--algorithm", options.algorithm, "of lockstep's all_reduce between hosts: direct, ring")
      ->check(CLI::IsMember({"direct", "ring"}))
      ->capture_default_str();
  app.add_option("--operation", options.operations, "only these")->delimiter(',')->check(CLI::IsMember(kOperations));
  app.add_option("--sizes", options.sizes, "bytes of float32 per rank; of all parts together")
      ->delimiter(',')
      ->capture_default_str();
  app.add_option("--turns", options.turns, "how often each system has its turn at each case")
      ->check(CLI::Range(1, 99))
      ->capture_default_str();
  app.add_option("--json", options.json, "file for the figures");
}

void run(const Options& options) {
  print_head(options.link);
  nlohmann::ordered_json json{{"turns", options.turns},
                              {"congestion_control", congestion_control(options.link)},
                              {"algorithm", options.algorithm}};
  for (const Setup& setup : setups_of(options)) {
    const Measured all = measure(options, setup);
    print(all, std::cout);
    json["setups"].push_back(to_json(all));
  }
  if (!options.json.empty()) save(options.json, json);
}

}  // namespace

int bench_hosts(int argc, const char* const* argv) {
  CLI::App app("Collectives between hosts with shaped links, beside flat Gloo, in turn. Needs root.",
               "lockstep bench hosts");
  Options options;
  add_options(app, options);
  if (const auto exit_code = parse(app, argc, argv)) return *exit_code;
  run(options);
  return 0;
}

}  // namespace lockstep::bench
