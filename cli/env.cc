// SPDX-License-Identifier: Apache-2.0
// `lockstep env`: every resolved setting of this process, and where it came from.
#include <unistd.h>

#include <iomanip>
#include <iostream>

#include "agent/clusters/environment.h"
#include "agent/meet/epoch.h"
#include "cli/commands.h"
#include "cli/installation.h"
#include "lockstep/base/command_line.h"
#include "lockstep/base/process/core_places.h"
#include "lockstep/base/process/machine_gpus.h"
#include "lockstep/base/text.h"
#include "lockstep/error.h"

namespace lockstep {
namespace {

Setting variable(const std::string& name) {
  const char* value = std::getenv(name.c_str());
  if (value == nullptr) return {.name = name, .value = "", .source = "not set"};
  return {.name = name, .value = value, .source = name};
}

Setting threads_per_rank(int allotted) {
  Setting threads = variable("OMP_NUM_THREADS");
  if (threads.value.empty()) threads = {"", concat(allotted), "cores_of_rank, a cgroup's quota or Slurm"};
  threads.name = "threads_per_rank";
  return threads;
}

std::vector<Setting> all_settings() {
  const JobEnvironment job = read_job_environment();
  std::vector<Setting> settings = job.settings;
  const CoreSet cores = cores_of(job, usable_cores());
  settings.push_back({"cores_online", concat(::sysconf(_SC_NPROCESSORS_ONLN)), "this machine"});
  settings.push_back({"cores_of_rank", to_string(cores), "this process's affinity, or its share of it"});
  settings.push_back(threads_per_rank(threads_of(job, cores)));
  for (const char* name : {"CUDA_VISIBLE_DEVICES", "LOCKSTEP_LOG", "LOCKSTEP_TRACE", "OMP_NUM_THREADS"})
    settings.push_back(variable(name));
  return settings;
}

void print(const std::vector<Setting>& settings) {
  size_t name = 0;
  size_t value = 0;
  for (const Setting& setting : settings) {
    name = std::max(name, setting.name.size());
    value = std::max(value, setting.value.size());
  }
  for (const Setting& setting : settings)
    std::cout << std::left << std::setw(static_cast<int>(name)) << setting.name << "  "
              << std::setw(static_cast<int>(value)) << setting.value << "  " << setting.source << '\n';
}

// Becomes a program that has torch, which takes its time to start, where there are GPUs. Returns if there are none.
void list_gpus() {
  if (!machine_has_gpus() && std::getenv("LOCKSTEP_SIMULATED_GPUS") == nullptr) return;
  std::cout << std::flush;
  find_torch();
  const std::string program = (installation_prefix() / "libexec" / "lockstep" / "lockstep-gpus").string();
  ::execl(program.c_str(), program.c_str(), nullptr);
}

void print_cmake_prefix() {
  if (!std::filesystem::exists(cmake_package()))
    throw UsageError({.what = "this lockstep has no CMake package",
                      .here = concat("no ", cmake_package().string()),
                      .likely = "it was started from its build folder",
                      .next = "cmake --install build/release --prefix DIR, then DIR/bin/lockstep env --cmake-prefix"});
  std::cout << installation_prefix().string() << '\n';
}

}  // namespace

int env_command(int argc, char** argv) {
  CLI::App app("Shows every resolved setting and where it came from, and the machine.", "lockstep env");
  int ranks = 0;
  app.add_option("--ranks", ranks, "draws the cores of so many ranks, too")->check(CLI::Range(1, kMostRanksOfMachine));
  bool only_prefix = false;
  app.add_flag("--cmake-prefix", only_prefix, "only what CMAKE_PREFIX_PATH needs for find_package(lockstep)");
  return parse_and_run(app, argc, argv, [&] {
    if (only_prefix) {
      print_cmake_prefix();
      return 0;
    }
    print(all_settings());
    std::cout << draw_machine(usable_cores(), ranks);
    list_gpus();
    return 0;
  });
}

}  // namespace lockstep
