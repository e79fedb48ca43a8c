// SPDX-License-Identifier: Apache-2.0
#include <c10/util/Exception.h>
#include <unistd.h>

#include <condition_variable>
#include <map>
#include <regex>
#include <set>
#include <sstream>

#include "tests/simulated_cuda/simulator.h"

namespace simulated_cuda {
namespace {

// "copy@1:3": the third copy from now on that device 1 takes part in fails.
struct Fault {
  std::string kind;
  int device = 0;
  long left = 0;
};

struct Faults {
  std::mutex mutex;
  std::condition_variable recovered;
  std::vector<Fault> due;
  std::map<int, std::string> failed;  // by device: CUDA's errors stay until the process ends
  std::set<int> hanging;
  std::set<std::pair<int, c10::StreamId>> hanging_streams;
};

bool parse(const std::string& text, std::vector<Fault>& faults) {
  static const std::regex kFault("(operator|copy|memory|hang|count)@([0-9]+):([0-9]+)");
  std::istringstream list(text);
  for (std::string item; std::getline(list, item, ',');) {
    std::smatch parts;
    if (!std::regex_match(item, parts, kFault)) return false;
    faults.push_back({parts[1], std::stoi(parts[2]), std::stol(parts[3])});
  }
  return true;
}

Faults& faults() {
  static auto* const kFaults = [] {
    auto* const made = new Faults;
    TORCH_CHECK(parse(settings().faults, made->due),
                "lockstep simulator: LOCKSTEP_SIMULATED_FAULTS=", settings().faults);
    return made;
  }();
  return *kFaults;
}

// Whether a fault of this kind is due now.
bool strikes(Faults& of, const std::string& kind, int device) {
  bool struck = false;
  std::erase_if(of.due, [&](Fault& fault) {
    if (fault.kind != kind || fault.device != device || --fault.left > 0) return false;
    return struck = true;
  });
  return struck;
}

void throw_if_failed(const Faults& of, int device) {
  const auto failed = of.failed.find(device);
  if (failed == of.failed.end()) return;
  throw c10::AcceleratorError({__func__, __FILE__, __LINE__}, 719,
                              "CUDA error: unspecified launch failure on cuda:" + std::to_string(device) +
                                  " (simulated: " + failed->second + " failed)");
}

void before(const std::string& kind, const std::string& name, int device) {
  Faults& of = faults();
  const std::lock_guard lock(of.mutex);
  if (strikes(of, "hang", device)) of.hanging.insert(device);
  if (strikes(of, kind, device)) of.failed.emplace(device, name);
  throw_if_failed(of, device);
}

bool is_hanging(const Faults& of, const c10::Stream& stream) {
  return of.hanging.contains(stream.device_index()) ||
         of.hanging_streams.contains({stream.device_index(), stream.id()});
}

}  // namespace

void before_operator(const std::string& name, int device) { before("operator", name, device); }

void before_copy(const std::string& name, int device) { before("copy", name, device); }

bool allocation_fails(int device) {
  const std::lock_guard lock(faults().mutex);
  return strikes(faults(), "memory", device);
}

void before_count() {
  const bool hangs = [] {
    const std::lock_guard lock(faults().mutex);
    return strikes(faults(), "count", 0);
  }();
  while (hangs) ::pause();
}

bool hangs(const c10::Stream& stream) {
  const std::lock_guard lock(faults().mutex);
  return is_hanging(faults(), stream);
}

void wait_while_it_hangs(const c10::Stream& stream) {
  Faults& of = faults();
  std::unique_lock lock(of.mutex);
  of.recovered.wait(lock, [&] { return !is_hanging(of, stream); });
  throw_if_failed(of, stream.device_index());
}

void hang_with(const c10::Stream& stream) {
  const std::lock_guard lock(faults().mutex);
  faults().hanging_streams.emplace(stream.device_index(), stream.id());
}

}  // namespace simulated_cuda

extern "C" {

int simulated_cuda_fail(const char* text) {
  std::vector<simulated_cuda::Fault> more;
  if (!simulated_cuda::parse(text, more)) return -1;
  simulated_cuda::Faults& of = simulated_cuda::faults();
  const std::lock_guard lock(of.mutex);
  of.due.insert(of.due.end(), more.begin(), more.end());
  return 0;
}

void simulated_cuda_recover() {
  simulated_cuda::Faults& of = simulated_cuda::faults();
  const std::lock_guard lock(of.mutex);
  of.due.clear();
  of.failed.clear();
  of.hanging.clear();
  of.hanging_streams.clear();
  of.recovered.notify_all();
}
}
