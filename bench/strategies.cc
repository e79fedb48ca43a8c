// SPDX-License-Identifier: Apache-2.0
// `lockstep bench strategies`: parameter server against ring: training over 1 to 8 hosts with equal, slow links,
// each strategy in turn: the time of a step, and what the busiest link carries, beside the formulas.
#include <fcntl.h>

#include <fstream>
#include <iostream>

#include "bench/harness.h"
#include "bench/network.h"
#include "bench/processes.h"
#include "lockstep/base/text.h"
#include "lockstep/error.h"
#include "lockstep/models.h"

namespace lockstep::bench {
namespace {

// ---- ways to keep the replicas on several hosts equal, each with the bytes that the literature gives for it
// N workers, a host each; S servers, a host each; K bytes of gradient.

struct StrategyCase {
  std::string name;       // in tables and plots
  std::string formula;    // of busiest_bytes, to print
  std::string arguments;  // of lockstep train
  int servers = 0;

  // In and out of the busiest host's link in one step, each direction, in K.
  double (*busiest)(int workers, int servers) = nullptr;
};

// Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms" (2009): the least there is.
double all_reduced(int workers, int) { return 2.0 * (workers - 1) / workers; }

// Li et al., "Scaling distributed machine learning with the parameter server" (OSDI 2014): each worker gives K and
// takes K; a server has its share of the keys. With more servers than workers a worker's own link is the busiest.
double served(int workers, int servers) { return std::max(1.0, static_cast<double>(workers) / servers); }

// One more strategy is one more line.
const std::vector<StrategyCase>& strategy_cases() {
  const std::string store = "--strategy kvstore --kvstore dist_sync --split-above 10000 --servers ";
  static const std::vector<StrategyCase> cases{
      {"ddp", "2(N-1)/N * K", "--strategy ddp", 0, all_reduced},
      {"ddp ring", "2(N-1)/N * K", "--strategy ddp --algorithm ring", 0, all_reduced},
      {"1 server", "N * K", store + "1", 1, served},
      {"2 servers", "N/2 * K", store + "2", 2, served},
      {"4 servers", "N/4 * K", store + "4", 4, served},
  };
  return cases;
}

// ---- one training, spread over the hosts of a network: a worker or a server on each

struct Training {
  std::vector<double> step_seconds;  // of each step
  std::vector<LinkBytes> links;      // of each host, while it ran
};

struct TrainingOptions {
  std::string model = "mlp";
  int workers = 1;
  int steps = 10;
};

constexpr int kBatchPerWorker = 4;
constexpr std::chrono::minutes kLongestTraining{5};

std::vector<std::string> arguments_of(const StrategyCase& one, const TrainingOptions& options,
                                      const std::string& metrics) {
  auto arguments = split(concat("--data synthetic --threads 1 --quiet --model ", options.model, " --batch-size ",
                                kBatchPerWorker * options.workers, " --max-steps ", options.steps, " ", one.arguments),
                         ' ');
  arguments.insert(arguments.end(), {"--metrics", metrics});
  return arguments;
}

std::vector<double> step_seconds(const std::string& metrics) {
  std::vector<double> seconds;
  std::ifstream file(metrics);
  for (std::string line; std::getline(file, line);)
    if (const auto event = Json::parse(line); event["event"] == "step")
      seconds.push_back(event["seconds"].get<double>());
  return seconds;
}

std::vector<LinkBytes> links_of(const Network& network) {
  std::vector<LinkBytes> links;
  for (int host = 0; host < network.hosts(); ++host) links.push_back(network.bytes(host));
  return links;
}

// `network`: a host for each server and each worker. Blocks until all processes have ended. Throws SystemError: one
// of them failed, or they take too long.
Training train(const Network& network, const StrategyCase& one, const TrainingOptions& options) {
  const TemporaryFolder folder;
  const auto arguments = arguments_of(one, options, folder.file("metrics"));
  const std::vector<LinkBytes> before = links_of(network);
  const UniqueFd nothing(::open("/dev/null", O_WRONLY | O_CLOEXEC));
  std::list<Process> processes;
  for (int host = 0; host < network.hosts(); ++host) {  // servers are the first ranks
    ProcessOptions process{
        .command = {"nsenter", concat("--net=", network.host(host).path()), beside_this("lockstep-train")},
        .variables = network.variables(host, 0, 1),
        .output_fd = nothing.get()};
    process.command.insert(process.command.end(), arguments.begin(), arguments.end());
    processes.emplace_back(process);
  }
  wait_for_success(processes, concat("a process of ", one.name), kLongestTraining);
  Training training{.step_seconds = step_seconds(folder.file("metrics")), .links = links_of(network)};
  for (std::size_t host = 0; host < before.size(); ++host) {
    training.links[host].sent -= before[host].sent;
    training.links[host].received -= before[host].received;
  }
  return training;
}

// ---- the comparison

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
    result.sent = std::max(result.sent, (longer.links[host].sent - shorter.links[host].sent) / steps);
    result.received = std::max(result.received, (longer.links[host].received - shorter.links[host].received) / steps);
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
  return program.run(argc, argv, [&] {
    const double gradient = gradient_bytes(options.model);
    std::vector<StrategyResult> results;
    for (const int workers : options.workers)
      for (const StrategyCase& one : chosen(strategy_cases(), options.cases))
        results.push_back(measure(program, one, workers, options, gradient));
    print(results, options, gradient);
    program.save(to_json(results, program, options, gradient));
  });
}

}  // namespace lockstep::bench
