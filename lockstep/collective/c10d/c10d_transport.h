// SPDX-License-Identifier: Apache-2.0
// collective/c10d/c10d_transport.h: c10d's NCCL as the transport of CUDA tensors.
//
// Flow:    collective/rendezvous.h -> here -> lockstep/world.h
// Owns:    the connections and threads of NCCL's backend
// Ranks:   every rank makes its transports at the same time, with the same store
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <memory>

#include "lockstep/collective/transport.h"

namespace lockstep {

// Blocks until this rank is connected to all others. Throws RendezvousError; DeviceError in a build without CUDA.
std::unique_ptr<Transport> make_nccl(const c10::intrusive_ptr<c10d::Store>& store, const TransportOptions& options);

// The GPU of a local rank. Throws DeviceError: a build without CUDA, no GPU, fewer GPUs than ranks; the
// message shows CUDA_VISIBLE_DEVICES.
int cuda_device_index(int local_rank);

int cuda_device_count();  // GPUs that are visible; 0 in a build without CUDA

}  // namespace lockstep
