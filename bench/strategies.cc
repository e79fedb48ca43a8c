// `lockstep bench strategies`: parameter server against ring (S1): training over 1 to 8 hosts with equal, slow links,
// each strategy in turn: the time of a step, and what the busiest link carries, beside the formulas.
#include <algorithm>
#include <iostream>
#include <memory>

#include "bench/benchmarks.h"
#include "bench/command_line.h"
#include "bench/hosts/link_options.h"
#include "bench/hosts/network.h"
#include "bench/report.h"
#include "bench/strategies/cases.h"
#include "bench/strategies/cluster.h"
#include "lockstep/base/text.h"
#include "lockstep/error.h"
#include "lockstep/models.h"

namespace lockstep::bench {
namespace {

constexpr int kWarmUp = 3;  // steps: the first ones connect, order buckets and grow memory

struct Options {
  std::vector<int> workers{1, 2, 3, 4, 5, 6, 7, 8};
  std::vector<std::string> cases;
  std::string model = "mlp";
  LinkOptions link{.megabits_per_second = 100};
  int steps = 8;
  int turns = 1;
  std::string json;
};

// One strategy at one number of workers.
struct Result {
  const StrategyCase* one;
  int workers;
  std::vector<double> seconds{};  // of a step, median of each turn
  double sent = 0;                // in a step by the host whose link carries most, bytes
  double received = 0;
  double formula = 0;  // the same, each direction
};

double gradient_bytes(const std::string& model) {
  double bytes = 0;
  for (const auto& parameter : model_task(model).make_model()->parameters())
    bytes += static_cast<double>(parameter.nbytes());
  return bytes;
}

std::vector<double> after_warm_up(const std::vector<double>& seconds) {
  return {seconds.begin() + kWarmUp, seconds.end()};
}

// What one step more costs: the start of a training, with its broadcast, is in both of two that differ in length.
void add_bytes(Result& result, const Training& longer, const Training& shorter, int steps) {
  for (std::size_t host = 0; host < longer.links.size(); ++host) {
    const auto per_step = [&](std::uint64_t LinkBytes::*direction) {
      return (static_cast<double>(longer.links[host].*direction) -
              static_cast<double>(shorter.links[host].*direction)) /
             steps;
    };
    result.sent = std::max(result.sent, per_step(&LinkBytes::sent));
    result.received = std::max(result.received, per_step(&LinkBytes::received));
  }
}

Result measure(const StrategyCase& one, int workers, const Options& options, double gradient) {
  Result result{.one = &one, .workers = workers, .formula = gradient * one.busiest(workers, one.servers)};
  const Network network(workers + one.servers, options.link);
  TrainingOptions run{.model = options.model, .workers = workers, .steps = kWarmUp};
  const Training shorter = train(network, one, run);
  run.steps += options.steps;
  for (int turn = 0; turn < options.turns; ++turn) {
    const Training longer = train(network, one, run);
    result.seconds.push_back(median(after_warm_up(longer.step_seconds)));
    if (turn == 0) add_bytes(result, longer, shorter, options.steps);
  }
  return result;
}

std::vector<const StrategyCase*> chosen_cases(const Options& options) {
  std::vector<const StrategyCase*> chosen;
  for (const StrategyCase& one : strategy_cases())
    if (options.cases.empty() || std::ranges::count(options.cases, one.name) > 0) chosen.push_back(&one);
  return chosen;
}

std::vector<std::string> names() {
  std::vector<std::string> names;
  for (const StrategyCase& one : strategy_cases()) names.push_back(one.name);
  return names;
}

std::vector<Result> measure_all(const Options& options, double gradient) {
  std::vector<Result> results;
  for (const int workers : options.workers)
    for (const StrategyCase* const one : chosen_cases(options)) {
      std::cerr << "\r" << workers << " workers, " << one->name << "              " << std::flush;
      results.push_back(measure(*one, workers, options, gradient));
    }
  std::cerr << "\r" << std::string(40, ' ') << "\r";
  return results;
}

std::string megabytes(double bytes) { return fixed(bytes / 1e6, 2); }

// Each byte of the formula costs its time on the busiest link; the rest is computing, headers and waiting.
void print(const std::vector<Result>& results, const Options& options, double gradient) {
  const double rate = options.link.megabits_per_second * 1e6 / 8;
  std::cout << "A step of " << options.model << " (K = " << megabytes(gradient)
            << " MB of gradient), N workers, a host each, links of " << fixed(options.link.megabits_per_second, 0)
            << " Mb/s; " << machine() << "\n\n";
  Table table({"strategy", "N", "step ms", "limit ms", "busiest link out MB", "in MB", "formula MB", "formula"});
  for (const Result& result : results)
    table.add({result.one->name, concat(result.workers), fixed(median(result.seconds) * 1e3, 1),
               fixed(result.formula / rate * 1e3, 1), megabytes(result.sent), megabytes(result.received),
               megabytes(result.formula), result.one->formula});
  table.print(std::cout);
  std::cout << "\nlimit: the formula's bytes at the link's rate, both directions at once. Bytes of a step, frames with "
               "headers.\n";
}

void keep(const std::vector<Result>& results, const Options& options, double gradient) {
  if (options.json.empty()) return;
  nlohmann::ordered_json json{{"model", options.model},
                              {"gradient_bytes", gradient},
                              {"bytes_per_second", options.link.megabits_per_second * 1e6 / 8},
                              {"steps", options.steps},
                              {"turns", options.turns},
                              {"congestion_control", congestion_control(options.link)}};
  for (const Result& result : results)
    json["results"].push_back({{"strategy", result.one->name},
                               {"workers", result.workers},
                               {"servers", result.one->servers},
                               {"seconds", median(result.seconds)},
                               {"turns", result.seconds},
                               {"sent", result.sent},
                               {"received", result.received},
                               {"formula", result.formula}});
  save(options.json, json);
}

void add_options(CLI::App& app, Options& options) {
  app.add_option("--workers", options.workers, "numbers of hosts that compute")
      ->delimiter(',')
      ->check(CLI::Range(1, 64))
      ->capture_default_str();
  app.add_option("--strategies", options.cases, "only these; all by default")
      ->delimiter(',')
      ->check(CLI::IsMember(names()));
  app.add_option("--model", options.model, "as lockstep train")
      ->check(CLI::IsMember(model_names()))
      ->capture_default_str();
  add_link_options(app, options.link);
  app.add_option("--steps", options.steps, "that are measured, of each training")
      ->check(CLI::Range(1, 10000))
      ->capture_default_str();
  app.add_option("--turns", options.turns, "trainings of each")->check(CLI::Range(1, 99))->capture_default_str();
  app.add_option("--json", options.json, "file for the figures");
}

}  // namespace

int bench_strategies(int argc, const char* const* argv) {
  CLI::App app("Parameter server against ring, over hosts with equal links. Needs root.", "lockstep bench strategies");
  Options options;
  add_options(app, options);
  if (const auto exit_code = parse(app, argc, argv)) return *exit_code;
  const double gradient = gradient_bytes(options.model);
  const std::vector<Result> results = measure_all(options, gradient);
  print(results, options, gradient);
  keep(results, options, gradient);
  return 0;
}

}  // namespace lockstep::bench
