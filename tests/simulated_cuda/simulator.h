// SPDX-License-Identifier: Apache-2.0
// tests/simulated_cuda/simulator.h: what the files of the simulator share.
//
// Work is done at once, in the order in which the program issues it, on the issuing thread. What a real GPU might do in
// another order is found by clocks (happens_before.h), not by chance.
#pragma once

#include <c10/core/Stream.h>

#include <cstddef>
#include <mutex>
#include <string>
#include <vector>

#include "tests/simulated_cuda/simulated_cuda.h"

namespace simulated_cuda {

constexpr auto kCuda = c10::DeviceType::CUDA;

// ---- settings.cc: from the environment, at the first use
struct Settings {
  std::vector<int> visible;  // numbers of the devices that CUDA_VISIBLE_DEVICES leaves
  size_t memory = 0;         // bytes of each device
  bool throws_at_races = true;
  bool checks_races = true;
  bool threads_apart = false;
  std::string without_peer_access;
  std::string faults;
  std::string counters_file;
};
const Settings& settings();
int device_count();

// Guards everything below that says so.
std::recursive_mutex& mutex();
using Lock = std::lock_guard<std::recursive_mutex>;

// ---- devices.cc
int current_device();
c10::Device device_of(int index);
c10::Stream current_stream(int device);
c10::Stream new_stream(int device);
void wait_for(const c10::Stream& stream);  // the host waits, and the wait is counted

// ---- waits.cc
bool leave_out(const char* kind, int device);  // the wait of that kind that comes now
bool waits_are_left_out();                     // or may be. Needs mutex().

// ---- counters.cc. Needs mutex().
SimulatedCudaCounters& counters(int device);
bool peer_access(int device, int peer);

// ---- faults.cc. Each throws where a fault is due.
void before_operator(const std::string& name, int device);
void before_copy(const std::string& name, int device);
bool allocation_fails(int device);
void before_count();
bool hangs(const c10::Stream& stream);
void wait_while_it_hangs(const c10::Stream& stream);
void hang_with(const c10::Stream& stream);  // it waits for a stream that hangs

}  // namespace simulated_cuda
