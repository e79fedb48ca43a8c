#include "bench/strategies/cluster.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <list>
#include <nlohmann/json.hpp>

#include "bench/temporary_folder.h"
#include "lockstep/base/text.h"
#include "lockstep/deadline.h"
#include "lockstep/error.h"
#include "lockstep/launch/process.h"

namespace lockstep::bench {
namespace {

constexpr std::chrono::minutes kLongestTraining{5};
constexpr int kPort = 29500;  // of a network that has nothing else in it

using Variables = std::vector<std::pair<std::string, std::string>>;

// Servers are the first ranks.
Variables variables_of(int host, const Network& network) {
  return {{"RANK", concat(host)},
          {"WORLD_SIZE", concat(network.hosts())},
          {"LOCAL_RANK", "0"},
          {"LOCAL_WORLD_SIZE", "1"},
          {"GROUP_RANK", concat(host)},
          {"MASTER_ADDR", network.address(0)},
          {"MASTER_PORT", concat(kPort)},
          {"OMP_NUM_THREADS", "1"}};
}

std::vector<std::string> command_of(const StrategyCase& one, const TrainingOptions& options,
                                    const std::string& metrics) {
  const auto train = std::filesystem::read_symlink("/proc/self/exe").parent_path() / "lockstep-train";
  std::vector<std::string> command{train.string(),
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

int execute(const std::vector<std::string>& command) {
  std::vector<char*> arguments;
  for (const std::string& argument : command) arguments.push_back(const_cast<char*>(argument.c_str()));
  arguments.push_back(nullptr);
  ::execv(arguments.front(), arguments.data());
  throw system_error("start", command.front());
}

Process start_on(const NetworkNamespace& host, const std::vector<std::string>& command, Variables variables) {
  const UniqueFd nothing(::open("/dev/null", O_WRONLY | O_CLOEXEC));
  ProcessOptions options;
  options.body = [&] {
    host.enter();
    return execute(command);
  };
  options.variables = std::move(variables);
  options.output_fd = nothing.get();
  ::sigemptyset(&options.signal_mask);
  return Process(options);
}

bool ended_well(const Process& process, const std::string& name) {
  const std::optional<ExitStatus> status = process.status();
  if (!status) return false;
  if (status->exit_code == 0 && status->signal == 0) return true;
  throw SystemError({.what = concat("a process of ", name, " failed"), .likely = "its own message is above"});
}

// The first that fails ends the wait, and with it all others.
void wait_for_all(std::list<Process>& processes, const std::string& name) {
  const Deadline deadline = Deadline::after(kLongestTraining);
  while (!processes.empty()) {
    std::vector<pollfd> ends;
    for (const Process& process : processes) ends.push_back({.fd = process.pidfd(), .events = POLLIN, .revents = 0});
    if (::poll(ends.data(), ends.size(), static_cast<int>(deadline.left().count())) == 0)
      throw SystemError({.what = concat(name, " does not end")});
    std::erase_if(processes, [&](const Process& process) { return ended_well(process, name); });
  }
}

std::vector<double> step_seconds(const std::string& metrics) {
  std::vector<double> seconds;
  std::ifstream file(metrics);
  for (std::string line; std::getline(file, line);)
    if (const auto event = nlohmann::json::parse(line); event["event"] == "step")
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
  std::list<Process> processes;
  for (int host = 0; host < network.hosts(); ++host)
    processes.push_back(start_on(network.host(host), command, variables_of(host, network)));
  wait_for_all(processes, one.name);
  Training training{.step_seconds = step_seconds(folder.file("metrics")), .links = links_of(network)};
  for (std::size_t host = 0; host < before.size(); ++host) {
    training.links[host].sent -= before[host].sent;
    training.links[host].received -= before[host].received;
  }
  return training;
}

}  // namespace lockstep::bench
