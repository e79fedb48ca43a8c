// SPDX-License-Identifier: Apache-2.0
// `lockstep env`: every resolved setting of this process, and where it came from.
#include <unistd.h>

#include <iomanip>
#include <iostream>

#include "cli/commands.h"
#include "lockstep/base/text.h"
#include "lockstep/error.h"
#include "lockstep/launch/environment.h"

namespace lockstep {
namespace {

Setting variable(const std::string& name) {
  const char* value = std::getenv(name.c_str());
  if (value == nullptr) return {.name = name, .value = "", .source = "not set"};
  return {.name = name, .value = value, .source = name};
}

Setting threads_per_rank(std::size_t cores) {
  const Setting threads = variable("OMP_NUM_THREADS");
  if (threads.value.empty()) return {.name = "threads_per_rank", .value = concat(cores), .source = "cores_of_rank"};
  return {.name = "threads_per_rank", .value = threads.value, .source = threads.source};
}

std::vector<Setting> all_settings() {
  const JobEnvironment job = read_job_environment();
  std::vector<Setting> settings = job.settings;
  const CoreSet cores = cores_of(job, usable_cores());
  settings.push_back({"cores_online", concat(::sysconf(_SC_NPROCESSORS_ONLN)), "this machine"});
  settings.push_back({"cores_of_rank", to_string(cores), "this process's affinity, or its share of it"});
  settings.push_back(threads_per_rank(cores.size()));
  for (const char* name : {"CUDA_VISIBLE_DEVICES", "LOCKSTEP_LOG", "OMP_NUM_THREADS"})
    settings.push_back(variable(name));
  return settings;
}

void print(const std::vector<Setting>& settings) {
  std::size_t name = 0;
  std::size_t value = 0;
  for (const Setting& setting : settings) {
    name = std::max(name, setting.name.size());
    value = std::max(value, setting.value.size());
  }
  for (const Setting& setting : settings)
    std::cout << std::left << std::setw(static_cast<int>(name)) << setting.name << "  "
              << std::setw(static_cast<int>(value)) << setting.value << "  " << setting.source << '\n';
}

}  // namespace

int env_command(int argc, char** argv) {
  if (argc == 2 && (std::string(argv[1]) == "--help" || std::string(argv[1]) == "-h")) {
    std::cout << "usage: lockstep env      (prints every resolved setting and where it came from)\n";
    return 0;
  }
  if (argc > 1) throw UsageError({.what = concat("lockstep env takes no arguments: ", argv[1])});
  print(all_settings());
  return 0;
}

}  // namespace lockstep
