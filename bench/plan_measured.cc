// SPDX-License-Identifier: Apache-2.0
#include "bench/plan_measured.h"

#include <cstdlib>
#include <iomanip>
#include <list>
#include <numeric>
#include <optional>
#include <random>
#include <sstream>

#include <ATen/Parallel.h>

#include "agent/start/launcher.h"
#include "bench/harness.h"
#include "bench/network.h"
#include "bench/plan_yardstick.h"
#include "bench/processes.h"
#include "lockstep/base/files/file.h"
#include "lockstep/base/text.h"
#include "lockstep/cores.h"
#include "lockstep/deadline.h"
#include "lockstep/error.h"
#include "lockstep/memory.h"
#include "lockstep/models.h"
#include "lockstep/sampler.h"
#include "lockstep/strategy.h"
#include "lockstep/train/builtin.h"
#include "tools/plan/measured_steps.h"

namespace lockstep::bench {
namespace {

constexpr std::chrono::minutes kLongestCase{10};

int servers_of(const PlanCase& one) { return one.choice.has_servers() ? one.choice.servers : 0; }

StrategyOptions strategy_of(const PlanCase& one) {
  StrategyOptions options = one.choice.options({.optimizer = plan_optimizer(), .seed = 1});
  options.devices = one.has_device_threads() ? one.devices : 1;
  return options;
}

// ---- A rank

// What each host's link has carried; empty on one machine.
using Links = std::vector<LinkBytes>;
using ReadLinks = std::function<Links()>;

// Of all ranks that train; none: it serves.
using Worker = std::optional<int>;

// The samples of a worker, or of all devices of the only process; a server has none. Stages all have the whole batch.
Batch part_of(const Datasets& data, const PlanCase& one, Worker worker) {
  if (!worker) return {};
  const bool whole = one.has_device_threads() || one.choice.kind == StrategyKind::kPipeline;
  const Range mine = whole ? Range{0, one.batch} : even_part(one.batch, *worker, one.hosts * one.devices);
  std::vector<int64_t> indices(static_cast<size_t>(mine.end - mine.begin));
  std::iota(indices.begin(), indices.end(), mine.begin);
  return data.train->make_batch(indices);
}

// Of a rank. Workers are bound to cores: those on one machine by the launcher.
int threads_of(const PlanCase& one, Worker worker) {
  const int at_once = one.has_device_threads() ? one.devices : worker ? 1 : one.hosts;
  return std::max(1, static_cast<int>(usable_cores().size()) / at_once);
}

// How many steps make one figure, and how many figures there are.
struct Windows {
  int steps;
  int count;
};

constexpr int kSteps = 8;  // of a window on one machine: averaging does one average in so many at most

int steps_between_averages(const PlanCase& one) {
  return one.choice.kind == StrategyKind::kAveraging ? static_cast<int>(one.choice.averaging.every) : 1;
}

// Between hosts steps may be long: then a window is a step, or the steps from one average to the next.
Windows windows_for(const PlanCase& one, double step) {
  constexpr int kFewest = 3, kMost = 20;
  constexpr double kFor = 2, kForHosts = 3, kLeast = 0.5;  // seconds: of all windows, of one
  if (one.hosts == 1) return {kSteps, std::clamp(static_cast<int>(kFor / (step * kSteps)), kFewest, kMost)};
  const int between = steps_between_averages(one);
  const int times = std::clamp(static_cast<int>(kLeast / (step * between)), 1, kSteps / between);
  const int steps = between * times;
  return {steps, std::clamp(static_cast<int>(kForHosts / (step * steps)), kFewest, kMost)};
}

class MeasuredTraining {
 public:
  MeasuredTraining(const PlanCase& one, int cores, World world, Worker worker)
      : one_(one),
        cores_(cores),
        world_(std::move(world)),
        worker_(worker),
        task_(model_task(one.model)),
        data_(load_datasets({.data = "auto"}, task_)),
        strategy_(make_strategy(world_, task_, options_of(one, /*serves=*/!worker))),
        batch_(part_of(data_, one, worker)) {}

  // Every rank makes the same number of steps, which the first ones decide. Ranks of a store that are not in step go at their own
  // pace: then the slowest worker's windows count.
  MeasuredCase measure(const ReadLinks& read_links) {
    const int half = one_.hosts == 1 ? kSteps / 2 : std::max(1, steps_between_averages(one_) / 2);
    steps(half);
    const double first = slowest(steps(half));
    const Windows windows = windows_for(one_, first);
    const int counted = one_.hosts == 1 ? kSteps : 3 * windows.steps;
    const Links before = read(read_links);
    steps(counted);
    const Links after = read(read_links);
    MeasuredCase found{.memory = memory()};
    for (size_t host = 0; host < after.size(); ++host)
      found.link_bytes = std::max({found.link_bytes, (after[host].sent - before[host].sent) / counted,
                                   (after[host].received - before[host].received) / counted});
    measure_windows(windows, found);
    return found;
  }

 private:
  static StrategyOptions options_of(const PlanCase& one, bool serves) {
    StrategyOptions options = strategy_of(one);
    options.kvstore.serves = serves;
    return options;
  }

  void measure_windows(const Windows& windows, MeasuredCase& found) {
    Yardstick yardstick(one_, cores_, world_, worker_, data_);
    Turns seconds, by_itself, busy;
    for (int i = 0; i < windows.count; ++i) {
      by_itself.push_back(yardstick.seconds());
      steps(steps_between_averages(one_));  // what the pause has cooled down: caches, TCP's window
      const double before = busy_seconds_of_cores();
      seconds.push_back(slowest(steps(windows.steps)));
      busy.push_back((busy_seconds_of_cores() - before) / windows.steps);
    }
    found.cores_busy = median(busy);
    found.step = median(seconds);
    found.by_itself = median(by_itself);
    found.steps = windows.count * windows.steps;
  }

  double steps(int count) {
    const Stopwatch watch;
    for (int i = 0; i < count; ++i) {
      strategy_->forward_backward(batch_);
      strategy_->update();
    }
    return watch.seconds() / count;
  }

  double slowest(double seconds) const { return plan::largest_of(world_, seconds); }

  // On rank 0, while no rank trains.
  Links read(const ReadLinks& read_links) const {
    if (!read_links) return {};
    world_.barrier();
    const Links links = world_.rank() == 0 ? read_links() : Links();
    world_.barrier();
    return links;
  }

  double memory() const {
    return plan::sum_of(world_, plan::own_bytes()) + plan::largest_of(world_, plan::shared_bytes());
  }

  const PlanCase& one_;
  int cores_;  // of the machine
  World world_;
  Worker worker_;
  Task task_;
  Datasets data_;
  std::unique_ptr<Strategy> strategy_;
  Batch batch_;
};

// Rank 0 writes what was measured to `results`.
int train_rank(const PlanCase& one, int cores, Worker worker, const std::string& results, const ReadLinks& read_links) {
  keep_freed_memory();
  const World world = World::from_env();
  at::set_num_threads(threads_of(one, worker));
  const MeasuredCase found = MeasuredTraining(one, cores, world, worker).measure(read_links);
  if (world.rank() == 0) write_file(results, to_json(found).dump());
  return 0;
}

// ---- Starting them

void measure_on_one_machine(const PlanCase& one, int cores, const std::string& results) {
  const int servers = servers_of(one);
  const auto rank = [&] {
    const char* const number = std::getenv("RANK");
    const int worker = (number == nullptr ? 0 : std::atoi(number)) - servers;
    return train_rank(one, cores, worker < 0 ? Worker() : worker, results, {});
  };
  const LaunchResult ended = launch(
      {.ranks = servers + (one.has_device_threads() ? 1 : one.devices), .servers = servers, .first_is_plain = true},
      rank);
  if (ended.exit_code != 0)
    throw SystemError({.what = concat(one.name(), ": a rank ended with code ", ended.exit_code)});
}

// 64 hexadecimal digits, so that ranks need nothing else in common (docs/security.md).
std::string new_secret() {
  std::random_device random;
  std::ostringstream digits;
  digits << std::hex << std::setfill('0');
  for (int i = 0; i < 8; ++i) digits << std::setw(8) << random();
  return digits.str();
}

// Server s is on host s % hosts, where it is numbered before the worker, as `lockstep run --servers` does it.
struct HostRank {
  int host;
  bool serves;
};
using HostRanks = std::vector<HostRank>;

HostRanks ranks_of(const PlanCase& one) {
  HostRanks ranks;
  for (int host = 0; host < one.hosts; ++host) {
    for (int server = host; server < servers_of(one); server += one.hosts) ranks.push_back({host, true});
    ranks.push_back({host, false});
  }
  return ranks;
}

LinkOptions link_of(const PlanCase& one) {
  constexpr const char* kLinuxDefault = "cubic";
  return {.megabits_per_second = static_cast<double>(one.link_mbit), .congestion_control = kLinuxDefault};
}

Variables variables_of(const HostRanks& ranks, int rank, const Network& network, const std::string& secret) {
  const int host = ranks[static_cast<size_t>(rank)].host;
  const auto is_here = [host](const HostRank& each) { return each.host == host; };
  const auto first = static_cast<int>(std::ranges::find_if(ranks, is_here) - ranks.begin());
  const auto here = std::ranges::count_if(ranks, is_here);
  Variables variables = network.variables(host, rank - first, static_cast<int>(here));
  for (const auto& [name, value] : Variables{{"RANK", concat(rank)},
                                             {"WORLD_SIZE", concat(ranks.size())},
                                             {"LOCKSTEP_LOCAL_SERVERS", concat(here - 1)},
                                             {"LOCKSTEP_SECRET", secret}}) {
    std::erase_if(variables, [&name = name](const auto& each) { return each.first == name; });
    variables.emplace_back(name, value);
  }
  return variables;
}

// As the launcher binds the ranks of one machine: each worker to its share; servers run where there is room.
CoreSet cores_of(const HostRank& rank, int hosts) {
  return rank.serves ? CoreSet() : cores_of_rank(usable_cores(), rank.host, hosts);
}

Links bytes_of_links(const Network& network) {
  Links links;
  for (int host = 0; host < network.hosts(); ++host) links.push_back(network.bytes(host));
  return links;
}

void measure_on_hosts(const PlanCase& one, int cores, const std::string& results) {
  const Network network(one.hosts, link_of(one));
  const HostRanks ranks = ranks_of(one);
  const std::string secret = new_secret();
  std::list<Process> processes;
  for (int rank = 0; rank < static_cast<int>(ranks.size()); ++rank) {
    const HostRank& place = ranks[static_cast<size_t>(rank)];
    const auto body = [&, place] {
      network.host(place.host).enter();
      return train_rank(one, cores, place.serves ? Worker() : place.host, results,
                        [&network] { return bytes_of_links(network); });
    };
    processes.emplace_back(ProcessOptions{
        .body = body, .variables = variables_of(ranks, rank, network, secret), .cores = cores_of(place, one.hosts)});
  }
  wait_for_success(processes, one.name(), kLongestCase);
}

}  // namespace

MeasuredLink measure_link(const PlanCase& one) {
  if (one.hosts == 1) return {};
  const Network network(2, link_of(one));
  return {.latency = measured_latency(network), .work_of_byte = measured_work_of_byte(network)};
}

Json to_json(const MeasuredCase& measured) {
  return {{"step", measured.step},
          {"by_itself", measured.by_itself},
          {"memory", measured.memory},
          {"link_bytes", measured.link_bytes},
          {"cores_busy", measured.cores_busy},
          {"steps", measured.steps}};
}

MeasuredCase measured_in(const Json& json) {
  return {.step = json.at("step"),
          .by_itself = json.at("by_itself"),
          .memory = json.at("memory"),
          .link_bytes = json.at("link_bytes"),
          .cores_busy = json.at("cores_busy"),
          .steps = json.at("steps")};
}

MeasuredCase measure_case(const PlanCase& one, int cores) {
  const TemporaryFolder folder;
  const std::string results = folder.file("results");
  one.hosts == 1 ? measure_on_one_machine(one, cores, results) : measure_on_hosts(one, cores, results);
  return measured_in(Json::parse(read_file(results)));
}

}  // namespace lockstep::bench
