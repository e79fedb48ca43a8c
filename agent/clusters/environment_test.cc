// SPDX-License-Identifier: Apache-2.0
#include "agent/clusters/environment.h"

#include <gtest/gtest.h>
#include <sys/socket.h>

#include <array>
#include <map>

#include "lockstep/base/files/unique_fd.h"
#include "lockstep/base/text.h"
#include "lockstep/error.h"

namespace lockstep {
namespace {

using VariableMap = std::map<std::string, std::string>;

JobEnvironment read(const VariableMap& variables) {
  return read_job_environment([&variables](const std::string& name) -> std::optional<std::string> {
    const auto found = variables.find(name);
    return found == variables.end() ? std::nullopt : std::optional(found->second);
  });
}

std::string error_of(const VariableMap& variables) {
  try {
    read(variables);
  } catch (const EnvironmentError& error) {
    return error.what();
  }
  return "no error";
}

std::string source_of(const JobEnvironment& job, const std::string& name) {
  for (const Setting& setting : job.settings)
    if (setting.name == name) return setting.source;
  return "not recorded";
}

VariableMap with(VariableMap variables, const VariableMap& changes) {
  for (const auto& [name, value] : changes) variables[name] = value;
  return variables;
}

VariableMap without(VariableMap variables, const std::vector<std::string>& names) {
  for (const std::string& name : names) variables.erase(name);
  return variables;
}

void expect_error(const VariableMap& variables, const std::vector<std::string>& parts) {
  const std::string message = error_of(variables);
  for (const std::string& part : parts)
    EXPECT_NE(message.find(part), std::string::npos) << part << " not in\n" << message;
}

const VariableMap kTorchrun = {{"RANK", "5"},
                               {"WORLD_SIZE", "8"},
                               {"LOCAL_RANK", "1"},
                               {"GROUP_RANK", "1"},
                               {"LOCAL_WORLD_SIZE", "4"},
                               {"MASTER_ADDR", "gpu-a"},
                               {"MASTER_PORT", "29500"},
                               {"TORCHELASTIC_RUN_ID", "none"}};

const VariableMap kSlurm = {{"SLURM_PROCID", "3"},
                            {"SLURM_NTASKS", "5"},
                            {"SLURM_LOCALID", "1"},
                            {"SLURM_NODEID", "1"},
                            {"SLURM_JOB_ID", "77"},
                            {"SLURM_STEP_ID", "2"},
                            {"SLURM_TASKS_PER_NODE", "2(x2),1"},
                            {"MASTER_ADDR", "gpu-a"},
                            {"MASTER_PORT", "29500"}};

const VariableMap kOpenMpi = {{"OMPI_COMM_WORLD_RANK", "1"},       {"OMPI_COMM_WORLD_SIZE", "2"},
                              {"OMPI_COMM_WORLD_LOCAL_RANK", "1"}, {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"},
                              {"OMPI_COMM_WORLD_NODE_RANK", "1"},  {"PMIX_NAMESPACE", "2101477377"}};

const VariableMap kMpich = {{"PMI_RANK", "1"},
                            {"PMI_SIZE", "2"},
                            {"MPI_LOCALRANKID", "1"},
                            {"MPI_LOCALNRANKS", "2"},
                            {"MASTER_ADDR", "127.0.0.1"},
                            {"MASTER_PORT", "29500"}};

TEST(Environment, is_one_rank_without_a_launcher) {
  const JobEnvironment job = read({});
  EXPECT_EQ(job.launcher, "none");
  EXPECT_EQ(job.world_size, 1);
  EXPECT_EQ(job.rank, 0);
  EXPECT_FALSE(job.job_id.empty());
  EXPECT_EQ(source_of(job, "rank"), "default");
}

TEST(Environment, reads_torchrun) {
  const JobEnvironment job = read(kTorchrun);
  EXPECT_EQ(job.launcher, "torchrun");
  EXPECT_EQ(job.rank, 5);
  EXPECT_EQ(job.world_size, 8);
  EXPECT_EQ(job.local_rank, 1);
  EXPECT_EQ(job.local_size, 4);
  EXPECT_EQ(job.node_rank, 1);
  EXPECT_EQ(job.master_addr, "gpu-a");
  EXPECT_EQ(job.master_port, 29500);
  EXPECT_EQ(job.job_id, "gpu-a-29500-none");
  EXPECT_EQ(source_of(job, "local_size"), "LOCAL_WORLD_SIZE");
  EXPECT_EQ(job.settings.size(), 9U);
}

TEST(Environment, a_restarted_job_has_another_id) {
  EXPECT_NE(read(with(kTorchrun, {{"TORCHELASTIC_RESTART_COUNT", "0"}})).job_id,
            read(with(kTorchrun, {{"TORCHELASTIC_RESTART_COUNT", "1"}})).job_id);
}

TEST(Environment, names_every_missing_variable_at_once) {
  expect_error({{"RANK", "0"}}, {"WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "EnvironmentError", "next:"});
  expect_error({{"WORLD_SIZE", "2"}}, {"missing: RANK, MASTER_ADDR, MASTER_PORT"});
  expect_error({{"RANK", "0"}, {"WORLD_SIZE", "2"}}, {"missing: MASTER_ADDR, MASTER_PORT"});
  expect_error(without(kTorchrun, {"LOCAL_WORLD_SIZE"}), {"missing: LOCAL_WORLD_SIZE"});
  expect_error(without(kSlurm, {"SLURM_LOCALID", "SLURM_NODEID", "SLURM_TASKS_PER_NODE"}),
               {"SLURM_LOCALID, SLURM_NODEID, SLURM_TASKS_PER_NODE"});
  expect_error({{"OMPI_COMM_WORLD_RANK", "0"}},
               {"OMPI_COMM_WORLD_SIZE, OMPI_COMM_WORLD_LOCAL_RANK, OMPI_COMM_WORLD_LOCAL_SIZE, PMIX_NAMESPACE"});
  expect_error({{"PMI_RANK", "0"}}, {"PMI_SIZE, MPI_LOCALRANKID, MPI_LOCALNRANKS"});
}

TEST(Environment, one_rank_by_hand_needs_no_address) {
  const JobEnvironment job = read({{"RANK", "0"}, {"WORLD_SIZE", "1"}});
  EXPECT_EQ(job.launcher, "torchrun");
  EXPECT_EQ(job.local_size, 1);
  EXPECT_TRUE(job.master_addr.empty());
}

TEST(Environment, ranks_set_by_hand_share_a_machine_if_their_address_is_loopback) {
  for (const char* address : {"localhost", "127.0.0.1", "::1"}) {
    const JobEnvironment job =
        read({{"RANK", "2"}, {"WORLD_SIZE", "3"}, {"MASTER_ADDR", address}, {"MASTER_PORT", "29500"}});
    EXPECT_EQ(job.local_rank, 2) << address;
    EXPECT_EQ(job.local_size, 3) << address;
    EXPECT_EQ(job.node_rank, 0) << address;
  }
}

TEST(Environment, ranks_set_by_hand_are_machines_of_their_own_otherwise) {
  const JobEnvironment job =
      read({{"RANK", "2"}, {"WORLD_SIZE", "3"}, {"MASTER_ADDR", "gpu-a"}, {"MASTER_PORT", "29500"}});
  EXPECT_EQ(job.local_rank, 0);
  EXPECT_EQ(job.local_size, 1);
  EXPECT_EQ(job.node_rank, 2);
}

TEST(Environment, reads_slurm) {
  const JobEnvironment job = read(kSlurm);
  EXPECT_EQ(job.launcher, "slurm");
  EXPECT_EQ(job.rank, 3);
  EXPECT_EQ(job.world_size, 5);
  EXPECT_EQ(job.local_rank, 1);
  EXPECT_EQ(job.local_size, 2);
  EXPECT_EQ(job.node_rank, 1);
  EXPECT_EQ(job.job_id, "77-2");
  EXPECT_EQ(read(with(kSlurm, {{"SLURM_PROCID", "4"}, {"SLURM_LOCALID", "0"}, {"SLURM_NODEID", "2"}})).local_size, 1);
}

TEST(Environment, a_step_of_slurm_counts_before_its_job) {
  const JobEnvironment job = read(
      with(kSlurm, {{"SLURM_NTASKS", "16"}, {"SLURM_STEP_NUM_TASKS", "4"}, {"SLURM_STEP_TASKS_PER_NODE", "2(x2)"}}));
  EXPECT_EQ(job.world_size, 4);
  EXPECT_EQ(source_of(job, "world_size"), "SLURM_STEP_NUM_TASKS");
}

TEST(Environment, the_shell_of_a_slurm_job_is_not_a_rank) {
  EXPECT_EQ(read(without(kSlurm, {"SLURM_STEP_ID"})).launcher, "none");
}

TEST(Environment, mpirun_inside_slurm_wins) {
  EXPECT_EQ(read(with(kSlurm, kOpenMpi)).launcher, "open-mpi");
  EXPECT_EQ(read(with(kSlurm, kMpich)).launcher, "mpich");
  EXPECT_EQ(read(with(kSlurm, kTorchrun)).launcher, "torchrun");
}

TEST(Environment, an_unreadable_task_count_of_slurm_is_named) {
  for (const char* text : {"two", "2(x", "2(x3", "2(xy)", ""})
    expect_error(with(kSlurm, {{"SLURM_TASKS_PER_NODE", text}}), {"SLURM_TASKS_PER_NODE", concat("\"", text, "\"")});
}

TEST(Environment, reads_open_mpi) {
  const JobEnvironment job = read(kOpenMpi);
  EXPECT_EQ(job.launcher, "open-mpi");
  EXPECT_EQ(job.rank, 1);
  EXPECT_EQ(job.local_size, 2);
  EXPECT_EQ(job.node_rank, 0);
  EXPECT_EQ(job.job_id, "2101477377");
  EXPECT_TRUE(job.master_addr.empty());
}

TEST(Environment, the_machine_of_an_open_mpi_rank_is_that_of_its_daemon) {
  const VariableMap two_machines =
      with(kOpenMpi, {{"OMPI_COMM_WORLD_SIZE", "4"}, {"MASTER_ADDR", "gpu-a"}, {"MASTER_PORT", "1"}});
  const char* uri = "2101477376.1;tcp://192.0.2.2:52235";
  EXPECT_EQ(read(with(two_machines, {{"OMPI_MCA_orte_local_daemon_uri", uri}})).node_rank, 1);
  EXPECT_EQ(read(with(two_machines, {{"PMIX_SERVER_URI41", "prterun-a.b-17@0.1;tcp4://1.2.3.4:5"}})).node_rank, 1);
  EXPECT_EQ(read(two_machines).node_rank, 0);
}

TEST(Environment, reads_mpich) {
  const JobEnvironment job = read(kMpich);
  EXPECT_EQ(job.launcher, "mpich");
  EXPECT_EQ(job.rank, 1);
  EXPECT_EQ(job.local_rank, 1);
  EXPECT_EQ(job.job_id, "127.0.0.1-29500");
}

TEST(Environment, an_mpich_job_is_named_after_the_process_behind_its_socket) {
  std::array<int, 2> ends{};
  ASSERT_EQ(::socketpair(AF_UNIX, SOCK_STREAM, 0, ends.data()), 0);
  const UniqueFd one(ends[0]);
  const UniqueFd other(ends[1]);
  const VariableMap variables = with(without(kMpich, {"MASTER_ADDR", "MASTER_PORT"}), {{"PMI_FD", concat(one.get())}});
  EXPECT_TRUE(read(variables).job_id.starts_with(concat(::getpid(), "-"))) << read(variables).job_id;
}

TEST(Environment, an_mpich_job_without_socket_needs_an_address) {
  expect_error(without(kMpich, {"MASTER_ADDR", "MASTER_PORT"}), {"missing: MASTER_ADDR, MASTER_PORT"});
}

TEST(Environment, uneven_machines_without_index_are_an_error) {
  expect_error(with(kMpich, {{"PMI_RANK", "2"}, {"PMI_SIZE", "4"}}), {"which machine", "rank 2"});
}

TEST(Environment, a_step_of_slurm_on_several_nodes_finds_its_address_by_itself) {
  const VariableMap by_hand =
      with(without(kSlurm, {"MASTER_ADDR", "MASTER_PORT"}), {{"SLURM_STEP_NODELIST", "node[01-02,07]"}});
  const JobEnvironment job = read(by_hand);
  EXPECT_EQ(job.master_addr, "node01");
  EXPECT_EQ(source_of(job, "master_addr"), "SLURM_STEP_NODELIST");
  EXPECT_EQ(job.master_port, read(by_hand).master_port);
  EXPECT_GT(job.master_ports, 1);
  EXPECT_EQ(job.other_host, "node07");
  EXPECT_NE(job.master_port, read(with(by_hand, {{"SLURM_STEP_ID", "3"}})).master_port);
  const JobEnvironment chosen = read(with(by_hand, {{"MASTER_PORT", "4711"}}));
  EXPECT_EQ(chosen.master_addr, "node01");
  EXPECT_EQ(chosen.master_port, 4711);
  EXPECT_EQ(chosen.master_ports, 1);
  EXPECT_EQ(read(with(by_hand, {{"MASTER_ADDR", "login"}})).master_addr, "login");
}

TEST(Environment, a_requeued_job_of_slurm_has_another_id) {
  EXPECT_NE(read(with(kSlurm, {{"SLURM_RESTART_COUNT", "1"}})).job_id,
            read(with(kSlurm, {{"SLURM_RESTART_COUNT", "2"}})).job_id);
}

TEST(Environment, an_unreadable_list_of_nodes_is_named) {
  const VariableMap step = without(kSlurm, {"MASTER_ADDR", "MASTER_PORT"});
  expect_error(with(step, {{"SLURM_STEP_NODELIST", "n[1-"}}), {"SLURM_STEP_NODELIST", "\"n[1-\"", "node[01-04,07]"});
  expect_error(step, {"SLURM_JOB_NODELIST", "incomplete"});
  expect_error(with(step, {{"SLURM_JOB_NODELIST", "n1"}, {"MASTER_PORT", "0"}}), {"MASTER_PORT", "\"0\""});
}

TEST(Environment, slurm_says_how_many_cores_a_rank_has) {
  EXPECT_EQ(read(kSlurm).cores, 0);
  EXPECT_EQ(read(with(kSlurm, {{"SLURM_CPUS_ON_NODE", "8"}})).cores, 4);
  EXPECT_EQ(read(with(kSlurm, {{"SLURM_CPUS_ON_NODE", "1"}})).cores, 1);
  EXPECT_EQ(read(with(kSlurm, {{"SLURM_CPUS_ON_NODE", "8"}, {"SLURM_CPUS_PER_TASK", "3"}})).cores, 3);
}

TEST(Environment, a_rank_has_a_thread_for_each_of_its_cores_within_its_share) {
  const CoreSet four = {0, 1, 2, 3};
  const JobEnvironment bound{.world_size = 2, .local_size = 2};
  EXPECT_EQ(threads_of(bound, four, std::nullopt), 4);
  EXPECT_EQ(threads_of(bound, four, 5.5), 3);
  EXPECT_EQ(threads_of(bound, four, 0.5), 1);
  JobEnvironment told = bound;
  told.cores = 2;
  EXPECT_EQ(threads_of(told, four, std::nullopt), 2);
}

TEST(Environment, ranks_of_an_mpirun_on_several_machines_need_no_address) {
  const JobEnvironment job =
      read(with(kOpenMpi, {{"OMPI_COMM_WORLD_SIZE", "4"}, {"OMPI_MCA_orte_local_daemon_uri", "1.0;"}}));
  EXPECT_TRUE(job.master_addr.empty());
  EXPECT_GT(job.world_size, job.local_size);
}

TEST(Environment, an_address_is_honoured_with_every_launcher) {
  const VariableMap address = {{"MASTER_ADDR", "gpu-a"}, {"MASTER_PORT", "29500"}};
  EXPECT_EQ(read(with(kOpenMpi, address)).master_addr, "gpu-a");
  EXPECT_EQ(read(with(kMpich, address)).master_port, 29500);
  expect_error(with(kOpenMpi, {{"MASTER_ADDR", "gpu-a"}}), {"missing: MASTER_PORT"});
}

TEST(Environment, names_the_variable_with_a_bad_value) {
  expect_error(with(kTorchrun, {{"RANK", "one"}}), {"RANK", "\"one\""});
  expect_error(with(kTorchrun, {{"RANK", ""}}), {"RANK", "\"\""});
  expect_error(with(kTorchrun, {{"RANK", "99999999999"}}), {"RANK", "99999999999"});
  expect_error(with(kTorchrun, {{"WORLD_SIZE", "-2"}}), {"WORLD_SIZE", "\"-2\""});
  expect_error(with(kTorchrun, {{"MASTER_PORT", "0"}}), {"MASTER_PORT", "\"0\""});
  expect_error(with(kTorchrun, {{"MASTER_PORT", "70000"}}), {"MASTER_PORT", "\"70000\""});
  expect_error(with(kTorchrun, {{"RANK", "8"}}), {"RANK is 8 but WORLD_SIZE is 8"});
  expect_error(with(kTorchrun, {{"LOCAL_RANK", "4"}}), {"LOCAL_RANK is 4 but LOCAL_WORLD_SIZE is 4"});
  expect_error(with(kTorchrun, {{"LOCAL_WORLD_SIZE", "9"}}), {"LOCAL_WORLD_SIZE is 9 but WORLD_SIZE is 8"});
  expect_error(with(kMpich, {{"MPI_LOCALNRANKS", "0"}}), {"EnvironmentError"});
}

}  // namespace
}  // namespace lockstep
