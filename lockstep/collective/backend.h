// collective/backend.h: the c10d backends that carry collectives: Gloo for tensors in host memory, NCCL for CUDA's.
//
// Flow:    collective/rendezvous.h -> here -> collective/world.h
// Owns:    a backend owns its connections and threads until its last reference is gone
// Threads: as c10d: one thread issues collectives
// Ranks:   every rank makes its backends at the same time, under the same store prefix
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <string>

namespace lockstep {

using BackendPtr = c10::intrusive_ptr<c10d::Backend>;

struct BackendOptions {
  int rank = 0;
  int size = 1;
  std::string address = "127.0.0.1";  // of this machine, as the other ranks reach it; GLOO_SOCKET_IFNAME goes first
  std::chrono::milliseconds timeout = std::chrono::minutes(5);
};

// Blocks until this rank is connected to all others. Throws RendezvousError.
BackendPtr make_gloo(const c10::intrusive_ptr<c10d::Store>& store, const BackendOptions& options);

// Throws DeviceError in a build without CUDA.
BackendPtr make_nccl(const c10::intrusive_ptr<c10d::Store>& store, const BackendOptions& options);

// The GPU of a local rank. Throws DeviceError: a build without CUDA, no GPU, fewer GPUs than ranks; says what
// CUDA_VISIBLE_DEVICES holds. S3.
int cuda_device_index(int local_rank);

// Whether --device auto should choose CUDA: a build with CUDA on a machine with a GPU that is visible.
bool cuda_is_available();

}  // namespace lockstep
