// SPDX-License-Identifier: Apache-2.0
// tests/simulated_cuda/simulated_cuda.h: what a test may ask of the simulated GPUs and do to them. The functions are found by
// linking liblockstep_simulated_cuda.so or by dlsym(). docs/design/simulated-cuda.md explains the simulator.
//
// Threads: any
#pragma once

#include <cstddef>
#include <cstdint>

extern "C" {

// Makes so many devices, as LOCKSTEP_SIMULATED_GPUS does: for this process and those that it starts. Comes before the first
// use of a device. Returns their number.
int simulated_cuda_make(int devices);

// What one device, or all of them, did since the start or the last reset. Copies are counted once, with the bytes that
// cross; copies within a device are operators.
struct SimulatedCudaCounters {
  uint64_t host_to_device;    // bytes
  uint64_t device_to_host;    // bytes
  uint64_t device_to_device;  // bytes that left this device over a peer link
  uint64_t staged;            // bytes that left this device for another through the host: no peer access
  uint64_t copies;            // calls behind the four numbers above
  uint64_t collectives;       // bytes given to collectives and messages between ranks
  uint64_t operators;
  uint64_t host_waits;    // of a thread for this device: synchronize, blocking copies, item()
  uint64_t stream_waits;  // of this device's streams for events
  uint64_t allocated;     // bytes now
  uint64_t peak;          // bytes, since the last reset
};

// `device`: -1 for the sum over all devices.
void simulated_cuda_counters(int device, SimulatedCudaCounters* counters);
void simulated_cuda_reset_counters();

// Missing waits found so far, and the newest one as text ("" where there is none). clear: forgets them.
uint64_t simulated_cuda_races();
size_t simulated_cuda_last_race(char* text, size_t size);
void simulated_cuda_clear_races();

// Leaves out one wait of the program: the number-th of a kind on a device from now on. Kinds: "event" (a stream waits for an event),
// "record_stream", "host" (a thread waits for a stream, an event or a device), and for waits for a call between ranks its
// name: "allreduce", "recv". Until it is called with "", races are counted, but neither printed nor thrown. number 0: only
// counts the waits.
void simulated_cuda_leave_out(const char* kind, int device, int number);
// Waits of that kind since then.
int simulated_cuda_waits();

// Adds faults, as LOCKSTEP_SIMULATED_FAULTS does: "operator@1:100", "copy@0:3", "memory@2:5", "hang@3:50", with commas
// between. The number counts from now on. Returns 0, or -1 where the text is not understood.
int simulated_cuda_fail(const char* faults);
// Ends all faults: failed devices work again, threads that wait for a device that hangs go on.
void simulated_cuda_recover();

// Memory limit of a device in bytes.
void simulated_cuda_limit(int device, size_t bytes);
// Whether a device reaches the other one's memory without the host.
void simulated_cuda_peer_access(int device, int peer, int allowed);
}
