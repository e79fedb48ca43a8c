// SPDX-License-Identifier: Apache-2.0
// `lockstep bench strategies`: parameter server against ring: training over 1 to 8 hosts with equal, slow links,
// each strategy in turn: the time of a step, and what the busiest link carries, beside the formulas.
#include <iostream>

#include "bench/benchmarks.h"
#include "bench/harness.h"
#include "bench/hosts/network.h"
#include "bench/strategies/cases.h"
#include "bench/strategies/cluster.h"
#include "lockstep/base/text.h"
#include "lockstep/error.h"
#include "lockstep/models.h"

namespace lockstep::bench {
namespace {

constexpr int kWarmUpSteps = 3;  // steps: the first ones connect, order buckets and grow memory

struct StrategiesOptions {
  std::vector<int> workers{1, 2, 3, 4, 5, 6, 7, 8};
  std::vector<std::string> cases;
  std::string model = "mlp";
  LinkOptions link{.megabits_per_second = 100};
  int steps = 8;
};

// One strategy at one number of workers.
struct StrategyResult {
  StrategyCase one;
  int workers;
  Turns seconds{};  // of a step, median of each turn
  double sent = 0;  // in a step by the host whose link carries most, bytes
  double received = 0;
  double formula = 0;  // the same, each direction
};

double gradient_bytes(const std::string& model) {
  double bytes = 0;
  for (const auto& parameter : model_task(model).make_model()->parameters())
    bytes += static_cast<double>(parameter.nbytes());
  return bytes;
}

// What one step more costs: the start of a training, with its broadcast, is in both of two that differ in length.
void add_bytes(StrategyResult& result, const Training& longer, const Training& shorter, int steps) {
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

StrategyResult measure(const Program& program, const StrategyCase& one, int workers, const StrategiesOptions& options,
                       double gradient) {
  StrategyResult result{.one = one, .workers = workers, .formula = gradient * one.busiest(workers, one.servers)};
  const Network network(workers + one.servers, options.link);
  TrainingOptions run{.model = options.model, .workers = workers, .steps = kWarmUpSteps};
  const Training shorter = train(network, one, run);
  run.steps += options.steps;
  program.take_turns(concat(workers, " workers, ", one.name), [&](int turn) {
    const Training longer = train(network, one, run);
    result.seconds.push_back(median({longer.step_seconds.begin() + kWarmUpSteps, longer.step_seconds.end()}));
    if (turn == 0) add_bytes(result, longer, shorter, options.steps);
  });
  return result;
}

std::string megabytes(double bytes) { return fixed(bytes / 1e6, 2); }

// Each byte of the formula costs its time on the busiest link; the rest is computing, headers and waiting.
void print(const std::vector<StrategyResult>& results, const StrategiesOptions& options, double gradient) {
  const double rate = options.link.megabits_per_second * 1e6 / 8;
  std::cout << "A step of " << options.model << " (K = " << megabytes(gradient)
            << " MB of gradient), N workers, a host each, links of " << fixed(options.link.megabits_per_second, 0)
            << " Mb/s; " << machine() << "\n\n";
  Table table({"strategy", "N", "step ms", "limit ms", "busiest link out MB", "in MB", "formula MB", "formula"});
  for (const StrategyResult& result : results)
    table.add({result.one.name, concat(result.workers), fixed(median(result.seconds) * 1e3, 1),
               fixed(result.formula / rate * 1e3, 1), megabytes(result.sent), megabytes(result.received),
               megabytes(result.formula), result.one.formula});
  table.print(std::cout);
  std::cout << "\nlimit: the formula's bytes at the link's rate, both directions at once. Bytes of a step, frames with "
               "headers.\n";
}

Json to_json(const std::vector<StrategyResult>& results, const Program& program, const StrategiesOptions& options,
             double gradient) {
  Json json{{"model", options.model},
            {"gradient_bytes", gradient},
            {"bytes_per_second", options.link.megabits_per_second * 1e6 / 8},
            {"steps", options.steps},
            {"turns", program.turns()},
            {"congestion_control", congestion_control(options.link)}};
  for (const StrategyResult& result : results)
    json["results"].push_back({{"strategy", result.one.name},
                               {"workers", result.workers},
                               {"servers", result.one.servers},
                               {"seconds", median(result.seconds)},
                               {"turns", result.seconds},
                               {"sent", result.sent},
                               {"received", result.received},
                               {"formula", result.formula}});
  return json;
}

void add_options(Program& program, StrategiesOptions& options) {
  program.list("--workers", options.workers, "numbers of hosts that compute")->check(CLI::Range(1, 64));
  program.list("--strategies", options.cases, "only these; all by default")
      ->check(CLI::IsMember(names_of(strategy_cases())));
  program.option("--model", options.model, "as lockstep train")->check(CLI::IsMember(model_names()));
  add_link_options(program, options.link);
  program.option("--steps", options.steps, "that are measured, of each training")->check(CLI::Range(1, 10000));
}

}  // namespace

int bench_strategies(int argc, const char* const* argv) {
  StrategiesOptions options;
  Program program("strategies", "Parameter server against ring, over hosts with equal links. Needs root.", 1);
  add_options(program, options);
  if (const auto exit_code = program.parse(argc, argv)) return *exit_code;
  const double gradient = gradient_bytes(options.model);
  std::vector<StrategyResult> results;
  for (const int workers : options.workers)
    for (const StrategyCase& one : chosen(strategy_cases(), options.cases))
      results.push_back(measure(program, one, workers, options, gradient));
  print(results, options, gradient);
  program.save(to_json(results, program, options, gradient));
  return 0;
}

}  // namespace lockstep::bench
