// SPDX-License-Identifier: Apache-2.0
#include "agent/clusters/environment.h"

#include <unistd.h>

#include <algorithm>
#include <cmath>

#include "agent/clusters/slurm.h"
#include "lockstep/base/files/proc_file.h"
#include "lockstep/base/sockets/local_socket.h"
#include "lockstep/base/sockets/port.h"
#include "lockstep/base/text.h"
#include "lockstep/error.h"

namespace lockstep {
namespace {

using Names = std::vector<std::string>;  // variables that mean the same; the first that is set counts

constexpr const char* kByHand =
    "set RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, GROUP_RANK, MASTER_ADDR and MASTER_PORT";

// "2101477376.1;tcp://…" -> 1: Open MPI runs one daemon per machine; the part before ';' is its job and its index.
std::optional<int> index_of_daemon(const std::string& uri) {
  const std::string name = uri.substr(0, uri.find(';'));
  int index = 0;
  return parse_int(name.substr(name.rfind('.') + 1), index) ? std::optional(index) : std::nullopt;
}

// Names the process that made the other end of socket `fd`; nothing if `fd` is no socket or that process can't be seen.
std::optional<std::string> identity_of_peer(int fd) try {
  const auto peer = peer_of(fd);
  if (!peer || peer->pid <= 0) return {};
  return concat(peer->pid, "-", start_time_of(peer->pid));
} catch (const SystemError&) {
  return {};
}

// Fills one JobEnvironment. Missing variables are collected, so that one error can name all of them.
class Reader {
 public:
  explicit Reader(const VariableLookup& lookup) : lookup_(lookup) {}

  JobEnvironment read() {
    if (is_set("RANK") || is_set("WORLD_SIZE"))
      read_torchrun();
    else if (is_task_of_srun())
      read_slurm();
    else if (is_set("OMPI_COMM_WORLD_RANK") || is_set("OMPI_COMM_WORLD_SIZE"))
      read_open_mpi();
    else if (is_set("PMI_RANK") || is_set("PMI_SIZE"))
      read_mpich();
    else
      read_nothing();
    check();
    return std::move(job_);
  }

 private:
  bool is_set(const std::string& name) const { return lookup_(name).has_value(); }

  // The shell of an sbatch script has SLURM_PROCID=0 too; SLURM_STEP_ID is only set in what srun starts. An mpirun
  // inside an allocation starts its daemons through srun, and its ranks inherit the daemon's variables.
  bool is_task_of_srun() const {
    return is_set("SLURM_STEP_ID") && is_set("SLURM_PROCID") && !is_set("OMPI_COMM_WORLD_RANK") &&
           !is_set("MPI_LOCALRANKID");
  }

  void begin(const std::string& launcher, const std::string& source, const std::string& rank, const Names& ranks) {
    set(job_.launcher, "launcher", launcher, source);
    require(job_.rank, "rank", {rank});
    require(job_.world_size, "world_size", ranks);
  }

  void read_torchrun() {
    begin("torchrun", is_set("RANK") ? "RANK" : "WORLD_SIZE", "RANK", {"WORLD_SIZE"});
    read_master(lookup_("WORLD_SIZE") != "1");
    read_local_ranks();
    if (!read(job_.node_rank, "node_rank", {"GROUP_RANK"})) derive_node_rank();
    read(job_.local_servers, "local_servers", {"LOCKSTEP_LOCAL_SERVERS"});
    job_.job_name = lookup_("LOCKSTEP_JOB").value_or(lookup_("TORCHELASTIC_RUN_ID").value_or(""));
    set_job_id_of_address();
  }

  // Variables set by hand often leave out the local ones. Ranks that meet on a loopback address are on one machine.
  // Any other address, this host's own name included, says nothing about where the other ranks are: then each rank
  // counts as a machine of its own, which is never wrong, only slower where they do share one.
  void read_local_ranks() {
    const bool one_machine = job_.world_size == 1 || is_loopback(job_.master_addr);
    if (!one_machine && (is_set("LOCAL_RANK") || is_set("LOCAL_WORLD_SIZE"))) {
      require(job_.local_rank, "local_rank", {"LOCAL_RANK"});
      require(job_.local_size, "local_size", {"LOCAL_WORLD_SIZE"});
      return throw_if_missing();
    }
    const std::string source = one_machine ? "derived: all ranks are on this machine" : "default";
    if (!read(job_.local_rank, "local_rank", {"LOCAL_RANK"}))
      set(job_.local_rank, "local_rank", one_machine ? job_.rank : 0, source);
    if (!read(job_.local_size, "local_size", {"LOCAL_WORLD_SIZE"}))
      set(job_.local_size, "local_size", one_machine ? job_.world_size : 1, source);
  }

  // A set of ranks that torchrun restarts keeps run id and port, and must not meet what is left of the set before it.
  void set_job_id_of_address() {
    if (job_.master_addr.empty()) return set_job_id_of_process();
    set_job_id({"MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"});
  }

  void read_slurm() {
    begin("slurm", "SLURM_STEP_ID", "SLURM_PROCID", {"SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"});
    require(job_.local_rank, "local_rank", {"SLURM_LOCALID"});
    require(job_.node_rank, "node_rank", {"SLURM_NODEID"});
    require({"SLURM_JOB_ID"});
    const Setting tasks = require({"SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"});
    throw_if_missing();
    const auto local_size = tasks_of_node(tasks.value, job_.node_rank);
    if (!local_size)
      throw_malformed(tasks, concat("the number of ranks of node ", job_.node_rank, ", as in \"2(x3),1\""));
    set(job_.local_size, "local_size", *local_size, tasks.source);
    set_job_id({"SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"});
    job_.job_name = "Slurm " + job_.job_id;
    read_cores_of_slurm();
    several_machines() ? read_master_of_slurm() : read_master(false);
  }

  // All ranks of a step know its nodes, of which the first has rank 0, and can compute ports that this step alone tries.
  void read_master_of_slurm() {
    if (!read(job_.master_addr, "master_addr", {"MASTER_ADDR"})) {
      const Setting nodes = require({"SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"});
      throw_if_missing();
      const auto ends = ends_of(nodes.value);
      if (!ends) throw_malformed(nodes, "a list of nodes, as in \"node[01-04,07]\"");
      set(job_.master_addr, "master_addr", ends->first, nodes.source);
      if (ends->second != ends->first) job_.other_host = ends->second;
    }
    if (read(job_.master_port, "master_port", {"MASTER_PORT"})) return check_port();
    set(job_.master_port, "master_port", first_port_of_step(job_.job_id), "derived: SLURM_JOB_ID, SLURM_STEP_ID");
    job_.master_ports = kStepPorts;
  }

  // Counts for a node that several steps share, if Slurm does not bind tasks to cores.
  void read_cores_of_slurm() {
    if (read(job_.cores, "cores", {"SLURM_CPUS_PER_TASK"})) return;
    int on_node = 0;
    const auto found = first({"SLURM_CPUS_ON_NODE"});
    if (found && parse_int(found->value, on_node) && on_node > 0 && job_.local_size > 0)
      set(job_.cores, "cores", std::max(1, on_node / job_.local_size), found->source);
  }

  void read_open_mpi() {
    begin("open-mpi", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_RANK", {"OMPI_COMM_WORLD_SIZE"});
    require(job_.local_rank, "local_rank", {"OMPI_COMM_WORLD_LOCAL_RANK"});
    require(job_.local_size, "local_size", {"OMPI_COMM_WORLD_LOCAL_SIZE"});
    require({"PMIX_NAMESPACE"});
    throw_if_missing();
    read_node_of_open_mpi();
    // Before version 5 the namespace is a hash of 16 bits; the key for the transports is random and long.
    set_job_id({"PMIX_NAMESPACE", "OMPI_MCA_orte_precondition_transports"});
    read_master(false);  // else the ranks ask mpirun for the address (agent/clusters/launcher_store.h)
  }

  // OMPI_COMM_WORLD_NODE_RANK is not the machine's index. That of the machine's daemon is: 0 is where mpirun runs, so
  // counting starts at 1 where mpirun runs on a machine without ranks.
  void read_node_of_open_mpi() {
    const auto uri = first({"OMPI_MCA_orte_local_daemon_uri", "PMIX_SERVER_URI41", "PMIX_SERVER_URI4"});
    const auto index = uri ? index_of_daemon(uri->value) : std::nullopt;
    if (index && several_machines()) return set(job_.node_rank, "node_rank", *index, uri->source);
    derive_node_rank();
  }

  void read_mpich() {
    begin("mpich", "PMI_RANK", "PMI_RANK", {"PMI_SIZE"});
    require(job_.local_rank, "local_rank", {"MPI_LOCALRANKID"});
    require(job_.local_size, "local_size", {"MPI_LOCALNRANKS"});
    throw_if_missing();
    derive_node_rank();
    read_master(false);
    set_job_id_of_mpich();
  }

  // Hydra gives no id. On one machine the process that holds the other end of the ranks' PMI socket is the same for all
  // ranks, also for programs inside a shell. Between machines the ranks meet through that socket, or at an address, and
  // need no id; so where the socket was closed.
  void set_job_id_of_mpich() {
    int fd = -1;
    const auto socket = first({"PMI_FD"});
    const auto peer = socket && parse_int(socket->value, fd) ? identity_of_peer(fd) : std::nullopt;
    if (peer && job_.master_addr.empty()) return set(job_.job_id, "job_id", *peer, "PMI_FD: the process behind it");
    read_master(job_.world_size > 1);
    set_job_id_of_address();
  }

  void read_nothing() {
    set(job_.launcher, "launcher", "none", "default");
    for (const auto& [setting, value] : {std::pair{"rank", job_.rank},
                                         {"world_size", job_.world_size},
                                         {"local_rank", job_.local_rank},
                                         {"local_size", job_.local_size},
                                         {"node_rank", job_.node_rank}})
      record(setting, value, "default");
    read(job_.cores, "cores", {"SLURM_CPUS_ON_NODE"});  // a batch script's: all ranks that it starts here share these
    set_job_id_of_process();
  }

  void set_job_id_of_process() {
    set(job_.job_id, "job_id", concat(::getpid(), "-", start_time_of(::getpid())), "this process");
  }

  // All of the variables that are set, joined.
  void set_job_id(const Names& names) {
    Names values;
    Names sources;
    for (const std::string& name : names)
      if (const auto value = lookup_(name)) {
        values.push_back(*value);
        sources.push_back(name);
      }
    set(job_.job_id, "job_id", join(values, "-"), join(sources, ", "));
  }

  // MASTER_ADDR and MASTER_PORT: set by torchrun, honoured with every launcher. Ranks on one machine can do without.
  void read_master(bool required) {
    if (!job_.master_addr.empty()) return;
    const bool both = is_set("MASTER_ADDR") && is_set("MASTER_PORT");
    const bool one = is_set("MASTER_ADDR") != is_set("MASTER_PORT");
    if (!required && !both && !(one && job_.world_size > 1)) return throw_if_missing();
    require(job_.master_addr, "master_addr", {"MASTER_ADDR"});
    require(job_.master_port, "master_port", {"MASTER_PORT"});
    throw_if_missing();
    check_port();
  }

  void check_port() const {
    if (job_.master_port < 1 || job_.master_port > 65535)
      throw_malformed(recorded("master_port"), "a port from 1 to 65535");
  }

  // Launchers without an index for machines fill one machine after another, and mostly evenly.
  void derive_node_rank() {
    const int first_rank = job_.rank - job_.local_rank;
    if (job_.local_size < 1 || first_rank % job_.local_size != 0 || job_.world_size % job_.local_size != 0)
      throw EnvironmentError(
          {.what = concat("can't tell which machine of the job rank ", job_.rank, " is on"),
           .here = concat(job_.launcher, ": local rank ", job_.local_rank, " of ", job_.local_size, ", ",
                          job_.world_size, " ranks in all"),
           .likely = "machines with different numbers of ranks, or ranks placed round robin",
           .next = concat("give each machine the same number of ranks, one machine after another; or ", kByHand)});
    set(job_.node_rank, "node_rank", first_rank / job_.local_size, "derived: rank, local_rank, local_size");
  }

  bool several_machines() const { return job_.world_size > job_.local_size; }

  void check() const {
    check_at_most("rank", job_.rank, "world_size", job_.world_size - 1);
    check_at_most("local_rank", job_.local_rank, "local_size", job_.local_size - 1);
    if (job_.local_servers > 0) check_at_most("local_servers", job_.local_servers, "local_size", job_.local_size - 1);
    check_at_most("local_size", job_.local_size, "world_size", job_.world_size);
  }

  void check_at_most(const std::string& setting, int value, const std::string& limit, int most) const {
    if (value <= most) return;
    const Setting& one = recorded(setting);
    const Setting& other = recorded(limit);
    throw EnvironmentError({.what = concat(one.source, " is ", one.value, " but ", other.source, " is ", other.value),
                            .here = concat("launcher ", job_.launcher),
                            .likely = "variables left over from another job, or set by hand",
                            .next = "unset them, or make them agree; ranks are counted from 0"});
  }

  [[noreturn]] void throw_malformed(const Setting& setting, const std::string& wanted) const {
    throw EnvironmentError({.what = concat(setting.source, " is \"", setting.value, "\", not ", wanted),
                            .here = concat("launcher ", job_.launcher),
                            .next = concat("correct ", setting.source, " or unset it")});
  }

  void throw_if_missing() const {
    if (missing_.empty()) return;
    const std::string missing = join(missing_, ", ");
    const bool only_master = missing.starts_with("MASTER_") && job_.launcher != "torchrun";
    throw EnvironmentError(
        {.what = concat("the environment of rank ", job_.rank, " is incomplete; missing: ", missing),
         .here = concat("launcher ", job_.launcher, ", found through ", recorded("launcher").source),
         .likely = only_master ? "a launcher that does not say where the ranks meet"
                               : "variables set by hand, or left over from another job",
         .next = only_master ? kSetMaster : concat("set ", missing, "; or unset the others to run as one rank")});
  }

  std::optional<Setting> first(const Names& names) const {
    for (const std::string& name : names)
      if (const auto value = lookup_(name)) return Setting{.name = "", .value = *value, .source = name};
    return {};
  }

  Setting require(const Names& names) {
    const auto found = first(names);
    if (!found) missing_.push_back(names.back());
    return found.value_or(Setting{});
  }

  template <class Value>
  void require(Value& field, const std::string& setting, const Names& names) {
    if (!read(field, setting, names)) missing_.push_back(names.back());
  }

  // False if none of the variables is set.
  template <class Value>
  bool read(Value& field, const std::string& setting, const Names& names) {
    const auto found = first(names);
    if (!found) return false;
    parse(*found, field);
    record(setting, field, found->source);
    return true;
  }

  void parse(const Setting& found, int& number) const {
    if (!parse_int(found.value, number) || number < 0) throw_malformed(found, "a whole number from 0 on");
  }

  void parse(const Setting& found, std::string& name) const {
    name = found.value;
    if (name.empty()) throw_malformed(found, "a name");
  }

  template <class Field, class Value>
  void set(Field& field, const std::string& setting, const Value& value, const std::string& source) {
    field = value;
    record(setting, value, source);
  }

  template <class Value>
  void record(const std::string& setting, const Value& value, const std::string& source) {
    job_.settings.push_back({.name = setting, .value = concat(value), .source = source});
  }

  const Setting& recorded(const std::string& setting) const {
    return *std::ranges::find(job_.settings, setting, &Setting::name);
  }

  const VariableLookup& lookup_;
  JobEnvironment job_;
  Names missing_;
};

std::optional<std::string> variable_of_this_process(const std::string& name) {
  const char* value = std::getenv(name.c_str());
  return value == nullptr ? std::nullopt : std::optional<std::string>(value);
}

}  // namespace

JobEnvironment read_job_environment(const VariableLookup& lookup) { return Reader(lookup).read(); }

JobEnvironment read_job_environment() { return read_job_environment(variable_of_this_process); }

CoreSet cores_of(const JobEnvironment& job, const CoreSet& usable) {
  const ptrdiff_t online = ::sysconf(_SC_NPROCESSORS_ONLN);
  const int workers = job.local_size - job.local_servers;
  const bool bound = std::ssize(usable) * workers <= online;
  if (bound || job.local_rank < job.local_servers) return usable;
  return cores_of_rank(usable, job.local_rank - job.local_servers, workers);
}

int threads_of(const JobEnvironment& job, const CoreSet& cores, std::optional<double> quota) {
  int threads = static_cast<int>(cores.size());
  if (job.cores > 0) threads = std::min(threads, job.cores);
  // Ranks that were bound to cores of their own still share the quota.
  const int workers = std::max(1, job.local_size - job.local_servers);
  if (quota) threads = std::min(threads, static_cast<int>(std::ceil(*quota)) / workers);
  return std::max(1, threads);
}

int allotted_cores() {
  const int usable = usable_core_count();
  try {
    const int told = read_job_environment().cores;
    return told > 0 ? std::min(usable, told) : usable;
  } catch (const EnvironmentError&) {  // a launcher's ranks need not be complete here
    return usable;
  }
}

std::string start_time_of(int pid) {
  constexpr size_t kStartTime = 19;
  return fields_of_stat(concat("/proc/", pid, "/stat")).at(kStartTime);
}

}  // namespace lockstep
