// SPDX-License-Identifier: Apache-2.0
#include <c10/util/Exception.h>
#include <dlfcn.h>
#include <link.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <sstream>

#include "tests/simulated_cuda/simulator.h"

namespace simulated_cuda {
namespace {

std::string text_of(const char* variable, const char* otherwise = "") {
  const char* value = std::getenv(variable);
  return value != nullptr ? value : otherwise;
}

long number_of(const char* variable, long otherwise) {
  const std::string text = text_of(variable);
  if (text.empty()) return otherwise;
  char* end = nullptr;
  const long value = std::strtol(text.c_str(), &end, 10);
  TORCH_CHECK(*end == '\0' && value >= 0, "lockstep simulator: ", variable, "=", text, " is not a number");
  return value;
}

// As CUDA reads it: up to the first that does not exist.
std::vector<int> visible_devices(int count) {
  std::vector<int> all(static_cast<size_t>(count));
  std::iota(all.begin(), all.end(), 0);
  if (std::getenv("CUDA_VISIBLE_DEVICES") == nullptr) return all;
  std::vector<int> visible;
  std::istringstream list(text_of("CUDA_VISIBLE_DEVICES"));
  for (std::string item; std::getline(list, item, ',');) {
    char* end = nullptr;
    const long index = std::strtol(item.c_str(), &end, 10);
    if (end == item.c_str() || index < 0 || index >= count) break;
    visible.push_back(static_cast<int>(index));
  }
  return visible;
}

Settings read() {
  Settings read;
  read.visible = visible_devices(static_cast<int>(number_of("LOCKSTEP_SIMULATED_GPUS", 0)));
  read.memory = static_cast<size_t>(number_of("LOCKSTEP_SIMULATED_MEMORY", 16384)) << 20;
  const std::string races = text_of("LOCKSTEP_SIMULATED_RACES", "throw");
  TORCH_CHECK(races == "throw" || races == "report" || races == "off",
              "lockstep simulator: LOCKSTEP_SIMULATED_RACES=", races, ": throw, report or off");
  read.throws_at_races = races == "throw";
  read.checks_races = races != "off";
  read.threads_apart = text_of("LOCKSTEP_SIMULATED_HOST") == "threads";
  read.without_peer_access = text_of("LOCKSTEP_SIMULATED_NO_PEER");
  read.faults = text_of("LOCKSTEP_SIMULATED_FAULTS");
  read.counters_file = text_of("LOCKSTEP_SIMULATED_COUNTERS");
  return read;
}

constexpr const char* kRefusal =
    "lockstep simulator: libtorch_cuda is loaded: it and the simulated GPUs would both be \"CUDA\"\n"
    "  likely: LD_PRELOAD=liblockstep_simulated_cuda.so with Python or with a build of the cuda preset\n"
    "  next: preload it into C++ programs of the release preset, which link libtorch_cpu alone\n";

[[noreturn]] void refuse() {
  std::fputs(kRefusal, stderr);
  ::_exit(1);
}

bool is_libtorch_cuda(const char* path) {
  return path != nullptr &&
         (std::strstr(path, "libtorch_cuda") != nullptr || std::strstr(path, "libtorch_global_deps") != nullptr);
}

int look_at_library(dl_phdr_info* library, size_t, void*) { return is_libtorch_cuda(library->dlpi_name) ? 1 : 0; }

// Before any file of the simulator registers something.
const bool kChecked = [] {
  if (::dl_iterate_phdr(&look_at_library, nullptr) != 0) refuse();
  return true;
}();

}  // namespace

const Settings& settings() {
  static const auto* const kSettings = new Settings(read());  // the counters are written when statics are gone
  return *kSettings;
}

int device_count() { return static_cast<int>(settings().visible.size()); }

std::recursive_mutex& mutex() {
  static auto* const kMutex = new std::recursive_mutex;  // tensors of static storage are freed late
  return *kMutex;
}

}  // namespace simulated_cuda

extern "C" int simulated_cuda_make(int devices) {
  ::setenv("LOCKSTEP_SIMULATED_GPUS", std::to_string(devices).c_str(), 1);
  return simulated_cuda::device_count();
}

// Python's torch loads libtorch_cuda this way; its registrations would end the process with a riddle.
extern "C" void* dlopen(const char* file, int mode) noexcept {
  if (simulated_cuda::is_libtorch_cuda(file)) simulated_cuda::refuse();
  static const auto kNext = reinterpret_cast<void* (*)(const char*, int)>(::dlsym(RTLD_NEXT, "dlopen"));
  return kNext(file, mode);
}
