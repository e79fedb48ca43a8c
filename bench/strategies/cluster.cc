// SPDX-License-Identifier: Apache-2.0
#include "bench/strategies/cluster.h"

#include <fcntl.h>

#include <chrono>
#include <fstream>
#include <list>

#include "bench/processes.h"
#include "lockstep/base/text.h"
#include "lockstep/error.h"

namespace lockstep::bench {
namespace {

constexpr std::chrono::minutes kLongestTraining{5};

std::vector<std::string> command_of(const StrategyCase& one, const TrainingOptions& options,
                                    const std::string& metrics) {
  std::vector<std::string> command{beside_this("lockstep-train"),
                                   "--model",
                                   options.model,
                                   "--data",
                                   "synthetic",
                                   "--batch-size",
                                   concat(options.batch_per_worker * options.workers),
                                   "--max-steps",
                                   concat(options.steps),
                                   "--threads",
                                   "1",
                                   "--quiet",
                                   "--metrics",
                                   metrics};
  command.insert(command.end(), one.arguments.begin(), one.arguments.end());
  return command;
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

}  // namespace

Training train(const Network& network, const StrategyCase& one, const TrainingOptions& options) {
  const TemporaryFolder folder;
  const auto command = command_of(one, options, folder.file("metrics"));
  const std::vector<LinkBytes> before = links_of(network);
  const UniqueFd nothing(::open("/dev/null", O_WRONLY | O_CLOEXEC));
  std::list<Process> processes;
  for (int host = 0; host < network.hosts(); ++host) {  // servers are the first ranks
    ProcessOptions process = network.host(host).inside(command);
    process.variables = network.variables(host, 0, 1);
    process.output_fd = nothing.get();
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

}  // namespace lockstep::bench
