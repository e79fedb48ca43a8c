// SPDX-License-Identifier: Apache-2.0
// `lockstep run`: starts a program once per rank, here or on several hosts. Its options have torchrun's names.
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <tuple>

#include <CLI/CLI.hpp>

#include "agent/clusters/environment.h"
#include "agent/meet/job_secret.h"
#include "agent/meet/machines.h"
#include "agent/start/hosts.h"
#include "agent/start/launcher.h"
#include "cli/commands.h"
#include "lockstep/base/command_line.h"
#include "lockstep/base/sockets/endpoint.h"
#include "lockstep/base/text.h"
#include "lockstep/observe/timeline_file.h"

namespace lockstep {
namespace {

constexpr const char* kNoJob = "none";  // torchrun's default

struct RunArguments {
  std::string ranks = "1";
  std::string nodes = "1";  // N or MIN:MAX
  std::string backend = "static";
  std::string endpoint;  // HOST[:PORT][,HOST[:PORT]...]
  std::string config;    // KEY=VALUE,...
  bool standalone = false;
  bool insecure_network = false;
  std::string hosts;
  std::string exports;
  bool is_called = false;
  std::string trace;
  StartOptions start;
  PlaceOptions place;
  FailureOptions failing{.stop_signals = {SIGUSR1, SIGUSR2}};  // not SIGTERM: a program may ignore it
  Meeting meeting{.places = {}, .job = kNoJob};
};

// Names the program in the usage line, and of an option with two spellings only the first.
class HelpFormatter : public CLI::Formatter {
 public:
  std::string make_usage(const CLI::App*, std::string) const override {
    return "usage: lockstep run [OPTIONS] [--] PROGRAM [ARGS...]\n";
  }
  std::string make_option_name(const CLI::Option* option, bool positional) const override {
    return option->get_name(positional, false);
  }
};

// One of torchrun's, with its meaning: also with underscores, and as PET_NAME in the environment, as Kubeflow does it.
template <class Value>
CLI::Option* add_torchruns(CLI::App& app, const std::string& name, Value& value, const std::string& help) {
  std::string other = name, variable = "PET_";
  std::ranges::replace(other, '-', '_');
  for (const char letter : other) variable += static_cast<char>(std::toupper(letter));
  return app.add_option(concat("--", name, other == name ? "" : ",--" + other), value, help)->envname(variable);
}

void add_place_options(CLI::App& app, RunArguments& arguments) {
  add_torchruns(app, "nproc-per-node", arguments.ranks,
                "ranks on this machine; gpu: one per GPU; cpu: one per core; auto: gpu, or cpu where there is none");
  app.add_option("--servers", arguments.start.servers, "of these: parameter servers, the first ranks");
  add_torchruns(app, "node-rank", arguments.place.node_rank, "which machine this is, from 0");
  add_torchruns(app, "master-addr", arguments.place.master_addr, "the machine of rank 0");
  add_torchruns(app, "master-port", arguments.place.master_port, "a free port there; 0: any, for one machine");
  add_torchruns(app, "nnodes", arguments.nodes,
                "number of machines; with --rdzv-backend c10d or etcd MIN:MAX: as many as come");
  add_torchruns(app, "rdzv-backend", arguments.backend,
                "static: --node-rank numbers the machines; c10d: numbered as they come, and the one at --rdzv-endpoint "
                "must stay up; etcd: likewise, and any may fail")
      ->check(CLI::IsMember({"static", "c10d", "etcd"}));
  add_torchruns(app, "rdzv-endpoint", arguments.endpoint,
                "HOST:PORT where the machines meet; etcd: HOST:PORT,… of its members");
  add_torchruns(app, "rdzv-id", arguments.meeting.job, "name of the job, the same on all machines");
  add_torchruns(
      app, "rdzv-conf", arguments.config,
      "join_timeout=SECONDS,last_call_timeout=SECONDS,lost_after=SECONDS (until a silent machine is lost: 3); "
      "for etcd also cacert=FILE,cert=FILE,key=FILE,etcd_prefix=TEXT");
  app.add_flag("--standalone", arguments.standalone, "one machine, whatever the options above say")
      ->envname("PET_STANDALONE");
  CLI::Option* const hosts = app.add_option(
      "--hosts", arguments.hosts,
      "start on these hosts over ssh: NAME:RANKS,… or mpirun's hostfile; RANKS defaults to --nproc-per-node");
  for (const char* name : {"--nnodes", "--node-rank", "--master-addr", "--rdzv-backend", "--standalone"})
    hosts->excludes(app.get_option(name));
  app.add_option("--export", arguments.exports, "variables passed to --hosts besides LOCKSTEP_… and OMP_…: NAME,…")
      ->needs(hosts);
  app.add_flag("--called", arguments.is_called)->group("");  // by --hosts of another machine
  app.add_flag("--insecure-network", arguments.insecure_network, "between machines: no job secret, no encryption");
}

void add_rank_options(CLI::App& app, RunArguments& arguments) {
  FailureOptions& failing = arguments.failing;
  app.add_option("--log-dir,--log_dir", arguments.start.log_dir,
                 "folder: ranks write to rankN.out and rankN.err there");
  add_torchruns(app, "max-restarts", failing.max_restarts,
                "how often failed ranks are replaced by new processes; 0: a failure ends the job")
      ->check(CLI::NonNegativeNumber);
  app.add_option("--min-ranks", failing.min_ranks,
                 "with no restart left, go on without failed ranks while at least this many remain; 0: end")
      ->check(CLI::NonNegativeNumber);
  app.add_flag("--workers-may-fail", failing.workers_may_fail, "go on when a worker fails, while others are left");
  app.add_option("--trace", arguments.trace, "file (.json) for a timeline of all ranks, for ui.perfetto.dev");
  app.add_option("--stop-code", failing.stop_code,
                 "exit code of a rank that stops when a signal asks it to: not a failure; default 143")
      ->check(CLI::Range(3, 255))
      ->default_str("");
  app.add_flag_callback(
      "--no-pin", [&arguments] { arguments.start.pin = false; }, "let every rank use every core");
  add_seconds(app, "--grace", failing.grace, 0, 86400, "seconds between SIGTERM and SIGKILL");
  add_seconds(app, "--hang-timeout", failing.hang.timeout, 0, 31536000,
              "seconds without progress of any rank until stacks are shown; 0: never");
  const auto set_then = [&failing](const std::string& name) {
    failing.hang.then = value_named<OnHang>(name, "--on-hang");
  };
  app.add_option_function<std::string>(
         "--on-hang", set_then,
         "then: restart (kill the rank that holds up the others; it counts as failed), end the job, or report")
      ->check(CLI::IsMember(all_names<OnHang>()))
      ->default_str(name_of(failing.hang.then));
}

// Counts what CUDA_VISIBLE_DEVICES names before the first that does not exist, as CUDA reads it.
int number_of_gpus() {
  std::error_code none;
  const std::filesystem::directory_iterator entries("/proc/driver/nvidia/gpus", none);
  const int gpus = none ? 0 : static_cast<int>(std::distance(begin(entries), end(entries)));
  const char* visible = std::getenv("CUDA_VISIBLE_DEVICES");
  if (visible == nullptr) return gpus;
  const auto names = split(visible, ',');
  const auto hidden =
      std::ranges::find_if(names, [](const std::string& name) { return name.empty() || name[0] == '-'; });
  return std::min(gpus, static_cast<int>(hidden - names.begin()));
}

int number_of_ranks(const std::string& text) {
  const int gpus = text == "auto" || text == "gpu" ? number_of_gpus() : 0;
  if (gpus > 0) return gpus;
  if (text == "auto" || text == "cpu") return allotted_cores();
  int ranks = 0;
  if (parse_int(text, ranks) && ranks <= kMostRanksOfMachine) return ranks;
  throw UsageError({.what = text == "gpu" ? "--nproc-per-node gpu, but this machine has none"
                                          : concat("--nproc-per-node is '", text, "'"),
                    .next = concat("give a number up to ", kMostRanksOfMachine, ", or auto")});
}

UsageError bad_option(const std::string& name, const std::string& value, const std::string& next) {
  return UsageError({.what = concat(name, " is '", value, "'"), .next = next});
}

// The least and the most machines.
std::pair<int, int> nodes_of(const std::string& text) {
  const auto parts = split(text, ':');
  int least = 0, most = 0;
  if (parts.size() > 2 || !parse_int(parts.front(), least) || !parse_int(parts.back(), most) || least < 1 ||
      most < least)
    throw bad_option("--nnodes", text, "give a number of machines, or MIN:MAX");
  return {least, most};
}

// "HOST:PORT", "[IPv6]:PORT", or "HOST" with this port.
Endpoint endpoint_given(const std::string& text, int port) {
  if (auto endpoint = endpoint_in(text, port)) return *endpoint;
  throw bad_option("--rdzv-endpoint", text, "give HOST:PORT, the address of one of the machines");
}

// torchrun's names; its other keys are about its own stores.
void read_config(const std::string& text, Meeting& meeting) {
  const std::map<std::string, std::string*> texts = {{"cacert", &meeting.certificates},
                                                     {"cert", &meeting.certificate},
                                                     {"key", &meeting.key},
                                                     {"etcd_prefix", &meeting.prefix}};
  const std::map<std::string, milliseconds*> times = {{"join_timeout", &meeting.timeout},
                                                      {"timeout", &meeting.timeout},
                                                      {"last_call_timeout", &meeting.last_call},
                                                      {"lost_after", &meeting.silence}};
  for (const std::string& pair : split(text, ',')) {
    const size_t equals = std::min(pair.find('='), pair.size());
    const std::string key = pair.substr(0, equals);
    const std::string value = pair.substr(std::min(equals + 1, pair.size()));
    if (texts.contains(key)) *texts.at(key) = value;
    if (!times.contains(key)) continue;
    int seconds = 0;
    if (!parse_int(value, seconds) || seconds < (key == "lost_after" ? 1 : 0))
      throw bad_option("--rdzv-conf", text, concat("give whole seconds: ", key, "=10"));
    *times.at(key) = std::chrono::seconds(seconds);
  }
}

// The machines meet and number themselves, as with torchrun's c10d backend.
void meet(RunArguments& arguments) {
  constexpr int kPortOfTorchrun = 29400;
  constexpr int kPortOfEtcd = 2379;
  const bool has_etcd = arguments.backend == "etcd";
  Meeting& meeting = arguments.meeting;
  if (arguments.endpoint.empty())
    throw UsageError(
        {.what = concat("--rdzv-backend ", arguments.backend, " without --rdzv-endpoint"),
         .next = "give every machine the same --rdzv-endpoint HOST:PORT: the address of one of them, or of etcd"});
  meeting.ranks = arguments.start.ranks;
  meeting.replaces = arguments.failing.max_restarts > 0;
  for (const std::string& text : has_etcd ? split(arguments.endpoint, ',') : std::vector{arguments.endpoint})
    meeting.places.push_back(endpoint_given(text, has_etcd ? kPortOfEtcd : kPortOfTorchrun));
  read_config(arguments.config, meeting);
  if (has_etcd && meeting.job == kNoJob)
    throw UsageError({.what = "--rdzv-backend etcd without --rdzv-id",
                      .likely = "etcd serves many jobs, which its keys tell apart by their names",
                      .next = "give every machine the same --rdzv-id, which no other job has"});
  if (meeting.certificates.empty() && !(meeting.certificate + meeting.key).empty())
    throw bad_option("--rdzv-conf", arguments.config, "add cacert=FILE: without it there is no TLS");
  arguments.place.machines = std::make_shared<Machines>(meeting, has_etcd ? open_etcd_store : open_first_machine_store);
}

// The machines were numbered by --node-rank.
void number_by_options(RunArguments& arguments) {
  PlaceOptions& place = arguments.place;
  place.nodes = arguments.meeting.most;
  if (arguments.meeting.least != place.nodes)
    throw bad_option("--nnodes", arguments.nodes, "add --rdzv-backend c10d and --rdzv-endpoint HOST:PORT");
  if (!arguments.endpoint.empty()) {
    const Endpoint endpoint = endpoint_given(arguments.endpoint, place.master_port);
    place.master_addr = endpoint.host;
    place.master_port = endpoint.port;
  } else if (place.nodes > 1 && place.master_addr.empty()) {
    throw UsageError(
        {.what = "several machines need an address at which they find each other",
         .here = concat("--nnodes ", place.nodes),
         .next = "give every machine the same --master-addr HOST and --master-port PORT, those of rank 0"});
  }
}

void find_place(RunArguments& arguments) {
  if (arguments.standalone) {
    arguments.place = {};
    return;
  }
  std::tie(arguments.meeting.least, arguments.meeting.most) = nodes_of(arguments.nodes);
  const bool are_several = arguments.meeting.most > 1;
  if (are_several && arguments.failing.min_ranks > 0)
    throw UsageError(
        {.what = concat("--min-ranks ", arguments.failing.min_ranks, " on several machines"),
         .here = concat("--nnodes ", arguments.nodes),
         .likely = "ranks are counted on each machine, and the others would not know that one is gone",
         .next = "leave it out; --nnodes MIN:MAX with --max-restarts says with how few machines to go on"});
  if (are_several && arguments.backend != "static")
    meet(arguments);
  else
    number_by_options(arguments);
}

// PROGRAM and its arguments: what CLI11 has not parsed, with or without a leading "--".
std::vector<std::string> command_of(const CLI::App& app) {
  std::vector<std::string> command = app.remaining();
  if (!command.empty() && command.front() == "--")
    command.erase(command.begin());
  else if (!command.empty() && command.front().starts_with('-'))
    throw UsageError({.what = concat("lockstep run has no option ", command.front()),
                      .next = "see lockstep run --help; put -- before a program whose name starts with a dash"});
  if (command.empty()) throw UsageError({.what = "no program to start", .next = "name one, with its arguments"});
  return command;
}

// They meet at the first host, each job of this machine at another port.
int launch_on_hosts(const CLI::App& app, const RunArguments& arguments, const std::vector<std::string>& command) {
  SshOptions options{
      .hosts = read_hosts(arguments.hosts),
      .version = "lockstep " LOCKSTEP_VERSION,
      .command = {std::filesystem::read_symlink("/proc/self/exe"), "run", "--called", "--rdzv-backend=c10d"},
      .program = command,
      .exports = split(arguments.exports, ','),
      .grace = arguments.failing.grace,
      .stop_code = arguments.failing.stop_code};
  const std::string& first = options.hosts.front().name;
  options.command.push_back(concat("--nnodes=", options.hosts.size()));
  if (arguments.endpoint.empty())
    options.command.push_back(
        concat("--rdzv-endpoint=", first.substr(first.find('@') + 1), ":", 20000 + ::getpid() % 10000));
  for (const CLI::Option* option : app.get_options())
    for (const std::string& value : option->results())
      if (const std::string& name = option->get_lnames().front();
          name != "hosts" && name != "export" && name != "nproc-per-node")
        options.command.push_back(concat("--", name, "=", value));
  for (Host& host : options.hosts)
    if (host.slots.empty()) host.slots = arguments.ranks;
  return run_on_hosts(options);
}

// The ranks record (LOCKSTEP_TRACE); what they leave is put together here. Those of several machines need one folder.
LaunchResult launch_traced(const RunArguments& arguments, const std::vector<std::string>& command, bool is_alone) {
  const auto launch_here = [&] { return launch(arguments.start, command, arguments.failing, arguments.place); };
  if (arguments.trace.empty()) return launch_here();
  require_timeline_file(arguments.trace);
  const std::string file = std::filesystem::absolute(arguments.trace);
  if (is_alone) remove_rings(file);
  ::setenv("LOCKSTEP_TRACE", file.c_str(), 1);
  const LaunchResult result = launch_here();
  if (is_alone) save_what_is_left(file, result.exit_code == 0);
  return result;
}

std::string describe_loss(const std::string& why) {
  return PeerLost({.what = "this machine ends its ranks: " + why,
                   .likely = "the others were killed, switched off or cut off, or one of them has ended the job",
                   .next = "look at their output; a launcher started again joins a job that still runs, else --resume "
                           "goes on from the last checkpoint"})
      .what();
}

// Tells who starts a job on several machines. It never prints the secret itself: this may be a log.
void say_where_the_secret_is() {
  if (is_secret_told() || network_is_insecure()) return;
  std::cerr
      << "lockstep: the job's secret is in this user's home, for machines that share it. For others make one here: "
      << kLineThatMakesASecret << '\n';
}

}  // namespace

int run_command(int argc, char** argv) {
  CLI::App app("Starts PROGRAM once per rank, here or on --hosts, and ends all ranks when one fails.", "lockstep run");
  app.formatter(std::make_shared<HelpFormatter>());
  app.prefix_command();
  app.option_defaults()->always_capture_default();
  RunArguments arguments;
  add_place_options(app, arguments);
  add_rank_options(app, arguments);
  return parse_and_run(app, argc, argv, [&] {
    const std::vector<std::string> command = command_of(app);
    if (!arguments.hosts.empty()) return launch_on_hosts(app, arguments, command);
    const UniqueFd secret = arguments.is_called ? start_remotely() : UniqueFd();
    if (arguments.insecure_network) ::setenv("LOCKSTEP_INSECURE_NETWORK", "1", 1);
    arguments.start.ranks = number_of_ranks(arguments.ranks);
    find_place(arguments);
    const PlaceInJob place = place_of(arguments.place, arguments.start.ranks);
    if (place.nodes > 1 && place.node_rank == 0) say_where_the_secret_is();
    const LaunchResult result = launch_traced(arguments, command, place.nodes == 1);
    if (result.lost) std::cerr << describe_loss(*result.lost) << '\n';
    if (result.failure) std::cerr << describe(*result.failure) << '\n';
    return result.exit_code;
  });
}

}  // namespace lockstep
