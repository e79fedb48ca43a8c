// SPDX-License-Identifier: Apache-2.0
// `lockstep jobs`: what tools/runs/top.py reads: the jobs of this user, an object a line
//
//   {"time": seconds since 1970, "unreadable": [pid, …], "jobs": [{…, "ranks": [what a rank has published so far]}]}
//
// Times of ranks are ns of CLOCK_MONOTONIC; sums have nothing yet of the present phase and wait.
#include <time.h>

#include <chrono>
#include <sstream>
#include <thread>

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include "cli/commands.h"
#include "cli/top/jobs.h"
#include "lockstep/base/command_line.h"
#include "lockstep/deadline.h"
#include "lockstep/observe/trace.h"

namespace lockstep {
namespace {

using Json = nlohmann::ordered_json;
using top::Job;

constexpr milliseconds kBetweenSearches = std::chrono::seconds(5);
constexpr milliseconds kBetweenSearchesInVain = std::chrono::seconds(2);
constexpr milliseconds kBetweenSearchesAtMost = std::chrono::minutes(1);

Json server_json(const ServerRecord& server) {
  return {{"clients", server.clients.load()},      {"in_hand", server.in_hand.load()},
          {"requests", server.requests.load()},    {"ns_in_hand", server.ns_in_hand.load()},
          {"gradients", server.gradients.load()},  {"delays", server.delays.load()},
          {"most_delay", server.most_delay.load()}};
}

Json by_phase(const std::array<std::atomic<int64_t>, kPhases>& sums) {
  Json times;
  for (size_t i = 0; i < kPhases; ++i) times[name_of(static_cast<Phase>(i))] = sums[i].load();
  return times;
}

void add_process(Json& json, int pid) {
  int64_t size = 0, resident = 0, shared = 0, on_core = 0, without_core = 0;
  std::istringstream(top::file_of(pid, "statm")) >> size >> resident >> shared;
  std::istringstream(top::file_of(pid, "schedstat")) >> on_core >> without_core;
  const char state = top::state_of(pid);
  json["state"] = state == 0 ? "" : std::string(1, state);
  json["memory_bytes"] = resident * ::sysconf(_SC_PAGESIZE);
  json["private_bytes"] = (resident - shared) * ::sysconf(_SC_PAGESIZE);
  json["ns_without_core"] = without_core;  // its main thread wanted to run
}

Json rank_json(const RankRecord& record) {
  Json json = {{"rank", record.job_rank.load()},
               {"pid", record.pid.load()},
               {"phase", name_of(record.phase.load())},
               {"phase_since", record.phase_since.load()},
               {"step", record.step.load()},
               {"moves", record.moves.load()},
               {"samples", record.samples.load()},
               {"loss", record.loss.load()},
               {"loader_workers", record.loader_workers.load()},
               {"wait_since", record.wait_since.load()},
               {"waits_for", record.waits_for.load()},
               {"calls_others", record.calls_others.load()},
               {"in_phase", by_phase(record.ns_in_phase)},
               {"waited", by_phase(record.ns_waited)},
               {"waited_for", Json::object()}};
  for (const WaitForPeer& peer : record.waited_for)
    if (peer.pid != 0) json["waited_for"][std::to_string(peer.pid)] = peer.ns.load();
  if (record.server.clients > 0) json["server"] = server_json(record.server);
  json["at"] = trace::now();
  add_process(json, record.pid);
  return json;
}

Json job_json(const Job& job) {
  Json json = {{"job", job.number},
               {"name", job.name},
               {"command", job.command},
               {"started_at", job.started_at},
               {"world_size", job.world_size},
               {"machines", job.nodes},
               {"machine", job.node_rank},
               {"ranks", Json::array()}};
  for (const top::Seat& seat : job.seats) json["ranks"].push_back(rank_json(seat.record()));
  return json;
}

milliseconds own_core_time() {
  timespec time{};
  ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return milliseconds(time.tv_sec * 1000 + time.tv_nsec / 1'000'000);
}

// A search that takes many milliseconds of a core, which ranks may need, makes the next one come later.
milliseconds until_next_search(bool in_vain, milliseconds took) {
  return std::clamp(1000 * took, in_vain ? kBetweenSearchesInVain : kBetweenSearches, kBetweenSearchesAtMost);
}

int print_jobs(double interval) {
  top::Found found;
  Deadline search = Deadline::after({});
  while (true) {
    if (search.passed()) {
      const milliseconds before = own_core_time();
      found = top::find_jobs();
      search = Deadline::after(until_next_search(found.jobs.empty(), own_core_time() - before));
    }
    std::erase_if(found.jobs, top::has_ended);
    const std::chrono::duration<double> now = std::chrono::system_clock::now().time_since_epoch();
    Json json = {{"time", now.count()}, {"unreadable", found.unreadable}, {"jobs", Json::array()}};
    for (const Job& job : found.jobs) json["jobs"].push_back(job_json(job));
    std::cout << json.dump() << std::endl;
    if (!std::cout) return 0;  // nobody reads any more
    std::this_thread::sleep_for(std::chrono::duration<double>(interval));
  }
}

}  // namespace

int jobs_command(int argc, char** argv) {
  CLI::App app("Prints the state of this user's jobs on this machine, one JSON object per line.", "lockstep jobs");
  double interval = 1;
  app.add_option("--interval", interval, "seconds between lines")
      ->capture_default_str()
      ->check(CLI::Range(0.1, 3600.0));
  return parse_and_run(app, argc, argv, [&] { return print_jobs(interval); });
}

}  // namespace lockstep
