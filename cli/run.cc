// SPDX-License-Identifier: Apache-2.0
// `lockstep run`: starts a program once per rank, here or on several hosts. Its options have torchrun's names.
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>

#include <CLI/CLI.hpp>

#include "agent/clusters/environment.h"
#include "agent/meet/insecure_network.h"
#include "agent/meet/job_secret.h"
#include "agent/meet/machines.h"
#include "agent/start/hosts.h"
#include "agent/start/launcher.h"
#include "cli/commands.h"
#include "lockstep/base/command_line.h"
#include "lockstep/base/text.h"
#include "lockstep/observe/timeline_file.h"

namespace lockstep {
namespace {

// torchrun's names and meanings. Every option can also be given as PET_NAME in the environment, as Kubeflow does it.
struct RendezvousArguments {
  std::string nodes = "1";  // N or MIN:MAX
  std::string backend = "static";
  std::string endpoint;  // HOST[:PORT][,HOST[:PORT]...]
  std::string id = "none";
  std::string config;  // KEY=VALUE,...
  bool standalone = false;
};

struct RunArguments {
  std::string ranks = "1";
  RendezvousArguments meeting;
  std::string master_addr;
  double grace_seconds = 5;
  double hang_seconds = std::chrono::duration<double>(HangOptions().timeout).count();
  std::string on_hang = name_of(HangOptions().then);
  bool no_pin = false;
  bool insecure_network = false;
  std::string hosts;
  std::string exports;
  bool is_called = false;
  std::string trace;
  LaunchOptions launch;  // the rest
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

void add_job_options(CLI::App& app, RunArguments& arguments) {
  LaunchOptions& launch = arguments.launch;
  app.add_option("--nproc-per-node,--nproc_per_node", arguments.ranks,
                 "ranks on this machine; gpu: one per GPU; cpu: one per core; auto: gpu, or cpu where there is none")
      ->envname("PET_NPROC_PER_NODE");
  app.add_option("--servers", launch.servers, "of these: parameter servers, the first ranks");
  app.add_flag("--workers-may-fail", launch.workers_may_fail, "go on when a worker fails, while others are left");
  app.add_option("--node-rank,--node_rank", launch.node_rank, "which machine this is, from 0")
      ->envname("PET_NODE_RANK");
  app.add_option("--master-addr,--master_addr", arguments.master_addr, "the machine of rank 0")
      ->envname("PET_MASTER_ADDR");
  app.add_option("--master-port,--master_port", launch.master_port, "a free port there; 0: any, for one machine")
      ->envname("PET_MASTER_PORT");
}

void add_meeting_options(CLI::App& app, RendezvousArguments& meeting) {
  app.add_option("--nnodes", meeting.nodes,
                 "number of machines; with --rdzv-backend c10d or etcd MIN:MAX: as many as come")
      ->envname("PET_NNODES");
  app.add_option(
         "--rdzv-backend,--rdzv_backend", meeting.backend,
         "static: --node-rank numbers the machines; c10d: numbered as they come, and the one at --rdzv-endpoint "
         "must stay up; "
         "etcd: likewise, and any may fail")
      ->check(CLI::IsMember({"static", "c10d", "etcd"}))
      ->envname("PET_RDZV_BACKEND");
  app.add_option("--rdzv-endpoint,--rdzv_endpoint", meeting.endpoint,
                 "HOST:PORT where the machines meet; etcd: HOST:PORT,… of its members")
      ->envname("PET_RDZV_ENDPOINT");
  app.add_option("--rdzv-id,--rdzv_id", meeting.id, "name of the job, the same on all machines")
      ->envname("PET_RDZV_ID");
  app.add_option(
         "--rdzv-conf,--rdzv_conf", meeting.config,
         "join_timeout=SECONDS,last_call_timeout=SECONDS,lost_after=SECONDS (until a silent machine is lost: 3); "
         "for etcd also cacert=FILE,cert=FILE,key=FILE,etcd_prefix=TEXT")
      ->envname("PET_RDZV_CONF");
  app.add_flag("--standalone", meeting.standalone, "one machine, whatever the options above say")
      ->envname("PET_STANDALONE");
}

// After the options that it replaces.
void add_hosts_options(CLI::App& app, RunArguments& arguments) {
  CLI::Option* const hosts = app.add_option(
      "--hosts", arguments.hosts,
      "start on these hosts over ssh: NAME:RANKS,… or mpirun's hostfile; RANKS defaults to --nproc-per-node");
  for (const char* name : {"--nnodes", "--node-rank", "--master-addr", "--rdzv-backend", "--standalone"})
    hosts->excludes(app.get_option(name));
  app.add_option("--export", arguments.exports, "variables passed to --hosts besides LOCKSTEP_… and OMP_…: NAME,…")
      ->needs(hosts);
  app.add_flag("--called", arguments.is_called)->group("");  // by --hosts of another machine
}

void add_security_options(CLI::App& app, RunArguments& arguments) {
  app.add_flag("--insecure-network", arguments.insecure_network, "between machines: no job secret, no encryption");
}

void add_rank_options(CLI::App& app, RunArguments& arguments) {
  LaunchOptions& launch = arguments.launch;
  app.add_option("--log-dir,--log_dir", launch.log_dir, "folder: ranks write to rankN.out and rankN.err there");
  app.add_option("--max-restarts,--max_restarts", launch.max_restarts,
                 "how often failed ranks are replaced by new processes; 0: a failure ends the job")
      ->envname("PET_MAX_RESTARTS")
      ->check(CLI::NonNegativeNumber);
  app.add_option("--min-ranks", launch.min_ranks,
                 "with no restart left, go on without failed ranks while at least this many remain; 0: end")
      ->check(CLI::NonNegativeNumber);
  app.add_option("--spares", launch.spares,
                 "with --max-restarts and Python: standby processes that replace lost ranks, with torch imported")
      ->check(CLI::NonNegativeNumber);
  app.add_option("--trace", arguments.trace, "file (.json) for a timeline of all ranks, for ui.perfetto.dev");
  app.add_option("--stop-code", launch.stop_code,
                 "exit code of a rank that stops when a signal asks it to: not a failure; default 143")
      ->check(CLI::Range(3, 255))
      ->default_str("");
  app.add_flag("--no-pin", arguments.no_pin, "let every rank use every core");
  app.add_option("--grace", arguments.grace_seconds, "seconds between SIGTERM and SIGKILL")
      ->check(CLI::Range(0.0, 86400.0));
  app.add_option("--hang-timeout", arguments.hang_seconds,
                 "seconds without progress of any rank until stacks are shown; 0: never")
      ->check(CLI::Range(0.0, 31536000.0));
  app.add_option("--on-hang", arguments.on_hang,
                 "then: restart (kill the rank that holds up the others; it counts as failed), end the job, or report")
      ->check(CLI::IsMember(all_names<OnHang>()));
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
  if (parse_int(text, ranks)) return ranks;
  throw UsageError({.what = text == "gpu" ? "--nproc-per-node gpu, but this machine has none"
                                          : concat("--nproc-per-node is '", text, "'"),
                    .next = "give a number, or auto"});
}

UsageError bad_option(const std::string& name, const std::string& value, const std::string& next) {
  return UsageError({.what = concat(name, " is '", value, "'"), .next = next});
}

struct Nodes {
  int least = 1;
  int most = 1;
};

Nodes nodes_of(const std::string& text) {
  const auto parts = split(text, ':');
  Nodes nodes;
  if (parts.size() > 2 || !parse_int(parts.front(), nodes.least) || !parse_int(parts.back(), nodes.most) ||
      nodes.least < 1 || nodes.most < nodes.least)
    throw bad_option("--nnodes", text, "give a number of machines, or MIN:MAX");
  return nodes;
}

// "HOST:PORT", "[IPv6]:PORT" or "HOST".
void split_endpoint(const std::string& text, std::string& host, int& port) {
  const std::size_t colon = text.rfind(':');
  const bool has_port = colon != std::string::npos && text.find(']', colon) == std::string::npos;
  host = text.substr(0, has_port ? colon : text.size());
  if (host.starts_with('[') && host.ends_with(']')) host = host.substr(1, host.size() - 2);
  if (host.empty() || (has_port && (!parse_int(text.substr(colon + 1), port) || port < 0 || port > 65535)))
    throw bad_option("--rdzv-endpoint", text, "give HOST:PORT, the address of one of the machines");
}

// torchrun's names; its other keys are about its own stores.
void read_config(const std::string& text, Meeting& meeting) {
  for (const std::string& pair : split(text, ',')) {
    const std::size_t equals = std::min(pair.find('='), pair.size());
    const std::string key = pair.substr(0, equals);
    const std::string value = pair.substr(std::min(equals + 1, pair.size()));
    std::string* const text_of = key == "cacert"        ? &meeting.certificates
                                 : key == "cert"        ? &meeting.certificate
                                 : key == "key"         ? &meeting.key
                                 : key == "etcd_prefix" ? &meeting.prefix
                                                        : nullptr;
    if (text_of != nullptr) *text_of = value;
    milliseconds* const time_of = key == "last_call_timeout"                  ? &meeting.last_call
                                  : key == "join_timeout" || key == "timeout" ? &meeting.timeout
                                  : key == "lost_after"                       ? &meeting.silence
                                                                              : nullptr;
    int seconds = 0;
    if (time_of == nullptr) continue;
    if (!parse_int(value, seconds) || seconds < (time_of == &meeting.silence ? 1 : 0))
      throw bad_option("--rdzv-conf", text, concat("give whole seconds: ", key, "=10"));
    *time_of = std::chrono::seconds(seconds);
  }
}

// The machines meet and number themselves, as with torchrun's c10d backend.
void meet(const RendezvousArguments& arguments, const Nodes& nodes, LaunchOptions& options) {
  constexpr int kPortOfTorchrun = 29400;
  constexpr int kPortOfEtcd = 2379;
  const bool has_etcd = arguments.backend == "etcd";
  if (arguments.endpoint.empty())
    throw UsageError(
        {.what = concat("--rdzv-backend ", arguments.backend, " without --rdzv-endpoint"),
         .next = "give every machine the same --rdzv-endpoint HOST:PORT: the address of one of them, or of etcd"});
  Meeting meeting{.job = arguments.id,
                  .least = nodes.least,
                  .most = nodes.most,
                  .ranks = options.ranks,
                  .replaces = options.max_restarts > 0};
  for (const std::string& text : has_etcd ? split(arguments.endpoint, ',') : std::vector{arguments.endpoint}) {
    Endpoint& place = meeting.places.emplace_back(Endpoint{"", has_etcd ? kPortOfEtcd : kPortOfTorchrun});
    split_endpoint(text, place.host, place.port);
  }
  read_config(arguments.config, meeting);
  if (has_etcd && arguments.id == RendezvousArguments().id)
    throw UsageError({.what = "--rdzv-backend etcd without --rdzv-id",
                      .likely = "etcd serves many jobs, which its keys tell apart by their names",
                      .next = "give every machine the same --rdzv-id, which no other job has"});
  if (meeting.certificates.empty() && !(meeting.certificate + meeting.key).empty())
    throw bad_option("--rdzv-conf", arguments.config, "add cacert=FILE: without it there is no TLS");
  options.machines = std::make_shared<Machines>(meeting, has_etcd ? open_etcd_store : open_first_machine_store);
}

// The machines were numbered by --node-rank.
void number_by_options(const RunArguments& arguments, const Nodes& nodes, LaunchOptions& options) {
  if (nodes.least != nodes.most)
    throw bad_option("--nnodes", arguments.meeting.nodes, "add --rdzv-backend c10d and --rdzv-endpoint HOST:PORT");
  options.nodes = nodes.most;
  if (!arguments.master_addr.empty()) options.master_addr = arguments.master_addr;
  if (!arguments.meeting.endpoint.empty())
    split_endpoint(arguments.meeting.endpoint, options.master_addr, options.master_port);
  else if (options.nodes > 1 && arguments.master_addr.empty())
    throw UsageError(
        {.what = "several machines need an address at which they find each other",
         .here = concat("--nnodes ", options.nodes),
         .next = "give every machine the same --master-addr HOST and --master-port PORT, those of rank 0"});
}

LaunchOptions launch_options(const RunArguments& arguments) {
  LaunchOptions options = arguments.launch;
  options.ranks = number_of_ranks(arguments.ranks);
  options.grace = in_milliseconds(arguments.grace_seconds);
  options.hang = {.timeout = in_milliseconds(arguments.hang_seconds),
                  .then = value_named<OnHang>(arguments.on_hang, "--on-hang")};
  options.pin = !arguments.no_pin;
  options.stop_signals = {SIGUSR1, SIGUSR2};  // not SIGTERM: a program may ignore it
  if (arguments.meeting.standalone) {
    options.node_rank = options.master_port = 0;
    return options;
  }
  const Nodes nodes = nodes_of(arguments.meeting.nodes);
  if (nodes.most > 1 && options.min_ranks > 0)
    throw UsageError(
        {.what = concat("--min-ranks ", options.min_ranks, " on several machines"),
         .here = concat("--nnodes ", arguments.meeting.nodes),
         .likely = "ranks are counted on each machine, and the others would not know that one is gone",
         .next = "leave it out; --nnodes MIN:MAX with --max-restarts says with how few machines to go on"});
  if (arguments.meeting.backend != "static" && nodes.most > 1)
    meet(arguments.meeting, nodes, options);
  else
    number_by_options(arguments, nodes, options);
  return options;
}

// PROGRAM and its arguments: what CLI11 has not parsed, with or without a leading "--".
std::vector<std::string> command_of(const CLI::App& app) {
  std::vector<std::string> command = app.remaining();
  if (command.empty()) return command;
  if (command.front() == "--") return {command.begin() + 1, command.end()};
  if (command.front().starts_with('-'))
    throw UsageError({.what = concat("lockstep run has no option ", command.front()),
                      .next = "see lockstep run --help; put -- before a program whose name starts with a dash"});
  return command;
}

// They meet at the first host, each job of this machine at another port.
int launch_on_hosts(const CLI::App& app, const RunArguments& arguments) {
  SshOptions options{
      .hosts = read_hosts(arguments.hosts),
      .version = "lockstep " LOCKSTEP_VERSION,
      .command = {std::filesystem::read_symlink("/proc/self/exe"), "run", "--called", "--rdzv-backend=c10d"},
      .program = command_of(app),
      .exports = split(arguments.exports, ','),
      .grace = in_milliseconds(arguments.grace_seconds),
      .stop_code = arguments.launch.stop_code};
  const std::string& first = options.hosts.front().name;
  options.command.push_back(concat("--nnodes=", options.hosts.size()));
  if (arguments.meeting.endpoint.empty())
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
LaunchResult launch_traced(const LaunchOptions& options, const std::vector<std::string>& command, std::string file) {
  if (file.empty()) return launch(options, command);
  require_timeline_file(file);
  file = std::filesystem::absolute(file);
  const bool is_alone = place_of(options).nodes == 1;
  if (is_alone) remove_rings(file);
  ::setenv("LOCKSTEP_TRACE", file.c_str(), 1);
  const LaunchResult result = launch(options, command);
  if (is_alone) save_what_is_left(file, result.exit_code == 0);
  return result;
}

std::string describe_loss(const std::string& why) {
  return PeerLost({.what = "this machine ends its ranks: " + why,
                   .likely = "the others were killed, switched off or cut off, or one of them has ended the job",
                   .next = "look at their output; a launcher started again joins a job that still runs, "
                           "else --resume goes on from the last checkpoint"})
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
  add_job_options(app, arguments);
  add_meeting_options(app, arguments.meeting);
  add_hosts_options(app, arguments);
  add_rank_options(app, arguments);
  add_security_options(app, arguments);
  return parse_and_run(app, argc, argv, [&] {
    if (!arguments.hosts.empty()) return launch_on_hosts(app, arguments);
    std::optional<RemoteStart> start;
    if (arguments.is_called) start.emplace();
    if (arguments.insecure_network) ::setenv("LOCKSTEP_INSECURE_NETWORK", "1", 1);
    const LaunchOptions options = launch_options(arguments);
    const PlaceInJob place = place_of(options);
    if (place.nodes > 1 && place.node_rank == 0) say_where_the_secret_is();
    const LaunchResult result = launch_traced(options, command_of(app), arguments.trace);
    if (result.lost) std::cerr << describe_loss(*result.lost) << '\n';
    if (result.failure) std::cerr << describe(*result.failure, options) << '\n';
    return result.exit_code;
  });
}

}  // namespace lockstep
