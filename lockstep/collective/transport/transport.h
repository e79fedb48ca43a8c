// SPDX-License-Identifier: Apache-2.0
// collective/transport/transport.h: what carries calls out. World chooses one for each kind of tensor.
//
//   shared memory   host tensors, all ranks on one machine (or threads of one process): collective/shm/
//   hierarchy       host tensors, ranks on several machines: shared memory inside each, Gloo between them
//   NCCL            CUDA tensors
//   itself          a world of one rank
//
// Owns:    its connections, until it is destroyed; what was started must not be used after that
// Threads: one at a time; messages may be started while another thread runs a collective. fail() from any thread
// Ranks:   every rank makes the same calls in the same order, except send and receive
#pragma once

#include "lockstep/collective/calls/tensor_call.h"
#include "lockstep/collective/meet/store_ptr.h"
#include "lockstep/collective/shm/group.h"

namespace lockstep {

class Transport {
 public:
  virtual ~Transport() = default;

  // Starts a collective or message. The transport holds its tensors until it is done.
  virtual FuturePtr start(TensorCall call) = 0;

  // Blocks until the call is done. Returns who sent it, of a receive.
  virtual int run(const TensorCall& call) {
    const FuturePtr future = start(call);
    future->wait();
    return call.operation == Operation::kReceive ? future->source() : kAnyRank;
  }

  // The transport of the sub-world of `ranks`, none for a rank that gives none. Every rank calls it; lists of different
  // ranks are equal or disjoint, and each rank is in its own. separate: it has connections of its own, so that neither is
  // lost with the other, and this timeout of this rank's waits.
  virtual std::unique_ptr<Transport> group(const std::vector<int>& ranks, std::optional<milliseconds> separate) = 0;

  virtual torch::Tensor allocate(torch::IntArrayRef sizes, const torch::TensorOptions& options) {
    return torch::empty(sizes, options);
  }

  // As World's; none where ranks don't share memory.
  virtual shm::GroupPtr machine_group() { return nullptr; }

  // This rank has failed: the others find out now and not at their deadline. From any thread. Nothing where there are no
  // others, or the closed connection tells them.
  virtual void fail(const std::string& /*reason*/) {}
};

// The transport of a world of one rank: the result is what that rank gives.
std::unique_ptr<Transport> make_self();

class GlooNetwork;

struct TransportOptions {
  int rank = 0;
  int size = 1;
  std::string describe;               // "rank 2 of 4 on gpu-a", for messages
  std::string address = "127.0.0.1";  // of this machine, as the other ranks reach it; GLOO_SOCKET_IFNAME goes first
  milliseconds timeout = kDefaultTimeout;
  std::shared_ptr<GlooNetwork> network{};  // that a group shares with its World; none: a new one
  bool message_headers = true;  // a message between machines begins with its dtype and length (gloo_messages.h)
};

// c10d's NCCL, for CUDA tensors. Blocks until this rank is connected to all others. Throws RendezvousError; DeviceError in
// a build without CUDA.
std::unique_ptr<Transport> make_nccl(const StorePtr& store, const TransportOptions& options);

}  // namespace lockstep
