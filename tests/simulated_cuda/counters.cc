// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <atomic>
#include <cstdio>
#include <fstream>
#include <map>
#include <set>

#include <sys/syscall.h>
#include <unistd.h>

#include "tests/simulated_cuda/simulator.h"

namespace simulated_cuda {
namespace {

std::map<int, SimulatedCudaCounters>& all_counters() {
  static auto* const kCounters = new std::map<int, SimulatedCudaCounters>;
  return *kCounters;
}

// A forked child has its parent's counters, and does not write them.
pid_t& counting_process() {
  static pid_t process = 0;
  return process;
}

void add(SimulatedCudaCounters& to, const SimulatedCudaCounters& from) {
  to.host_to_device += from.host_to_device;
  to.device_to_host += from.device_to_host;
  to.device_to_device += from.device_to_device;
  to.staged += from.staged;
  to.copies += from.copies;
  to.collectives += from.collectives;
  to.operators += from.operators;
  to.host_waits += from.host_waits;
  to.stream_waits += from.stream_waits;
  to.allocated += from.allocated;
  to.peak += from.peak;
}

// One line per device, appended when the process ends, however; a process that used no device writes none.
void write_counters() {
  static std::atomic<bool> written{false};
  if (settings().counters_file.empty() || counting_process() != ::getpid() || written.exchange(true)) return;
  std::ofstream file(settings().counters_file, std::ios::app);
  for (const auto& [device, of] : all_counters())
    file << "{\"pid\": " << ::getpid() << ", \"device\": " << device << ", \"host_to_device\": " << of.host_to_device
         << ", \"device_to_host\": " << of.device_to_host << ", \"device_to_device\": " << of.device_to_device
         << ", \"staged\": " << of.staged << ", \"copies\": " << of.copies << ", \"collectives\": " << of.collectives
         << ", \"operators\": " << of.operators << ", \"host_waits\": " << of.host_waits
         << ", \"stream_waits\": " << of.stream_waits << ", \"peak\": " << of.peak
         << ", \"races\": " << simulated_cuda_races() << "}" << std::endl;
}

struct AtExit {
  ~AtExit() { write_counters(); }
};
const AtExit kAtExit;

// Pairs that can't reach each other: LOCKSTEP_SIMULATED_NO_PEER=0-1,2-3, or all.
std::set<std::pair<int, int>> read_pairs_apart() {
  std::set<std::pair<int, int>> apart;
  const std::string& text = settings().without_peer_access;
  for (int one = 0; one < device_count(); ++one)
    for (int other = 0; other < device_count(); ++other) {
      const std::string pair = std::to_string(std::min(one, other)) + "-" + std::to_string(std::max(one, other));
      if (one != other && (text == "all" || ("," + text + ",").find("," + pair + ",") != std::string::npos))
        apart.emplace(one, other);
    }
  return apart;
}

std::set<std::pair<int, int>>& pairs_apart() {
  static auto* const kApart = new auto(read_pairs_apart());
  return *kApart;
}

}  // namespace

SimulatedCudaCounters& counters(int device) {
  if (counting_process() == 0) counting_process() = ::getpid();
  return all_counters()[device];
}

[[noreturn]] void end_process(int code) {
  write_counters();
  ::syscall(SYS_exit_group, code);
  __builtin_unreachable();
}

bool peer_access(int device, int peer) { return !pairs_apart().contains({device, peer}); }

}  // namespace simulated_cuda

extern "C" {

// A rank of `lockstep train` ends this way, without destructors.
void _exit(int code) { simulated_cuda::end_process(code); }
void _Exit(int code) noexcept { simulated_cuda::end_process(code); }

void simulated_cuda_counters(int device, SimulatedCudaCounters* counters) {
  const simulated_cuda::Lock lock(simulated_cuda::mutex());
  *counters = {};
  for (const auto& [of, counted] : simulated_cuda::all_counters())
    if (device < 0 || device == of) simulated_cuda::add(*counters, counted);
}

void simulated_cuda_reset_counters() {
  const simulated_cuda::Lock lock(simulated_cuda::mutex());
  for (auto& [device, counted] : simulated_cuda::all_counters()) {
    const uint64_t allocated = counted.allocated;
    counted = {};
    counted.allocated = counted.peak = allocated;
  }
}

void simulated_cuda_peer_access(int device, int peer, int allowed) {
  const simulated_cuda::Lock lock(simulated_cuda::mutex());
  if (allowed != 0)
    simulated_cuda::pairs_apart().erase({device, peer});
  else
    simulated_cuda::pairs_apart().emplace(device, peer);
}

// Of CUDA's runtime: what libtorch has no device-generic call for.
int cudaDeviceCanAccessPeer(int* can, int device, int peer) {
  const simulated_cuda::Lock lock(simulated_cuda::mutex());
  *can = device != peer && simulated_cuda::peer_access(device, peer) ? 1 : 0;
  return 0;
}
}
