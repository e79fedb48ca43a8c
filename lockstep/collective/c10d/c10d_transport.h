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

}  // namespace lockstep
