// SPDX-License-Identifier: Apache-2.0
// collective/transport.h: what carries calls out. World chooses one for each kind of tensor.
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

#include <torch/types.h>

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/collective/future.h"
#include "lockstep/collective/shm/group.h"
#include "lockstep/collective/tensor_call.h"

namespace lockstep {

using RankLists = std::vector<std::vector<int>>;

class Transport {
 public:
  virtual ~Transport() = default;

  // Starts a collective or message. The transport holds its tensors until it is done.
  virtual FuturePtr start(TensorCall call) = 0;

  // Blocks until the call is done. Returns who sent it, of a receive.
  virtual int run(const TensorCall& call) {
    const FuturePtr future = start(call);
    future->wait();
    return call.call.operation == Operation::kReceive ? future->source() : kAnyRank;
  }

  // The transport of the sub-world of lists[rank], none for a rank whose list is empty. Every rank calls it, with the
  // same lists: all ranks of a list have that list, and no rank is in two.
  virtual std::unique_ptr<Transport> group(const RankLists& lists) = 0;

  // The same with connections of its own: neither is lost with the other. `timeout`: of this rank's waits.
  virtual std::unique_ptr<Transport> separate(const RankLists& lists, std::chrono::milliseconds /*timeout*/) {
    return group(lists);
  }

  virtual torch::Tensor allocate(torch::IntArrayRef sizes, const torch::TensorOptions& options) {
    return torch::empty(sizes, options);
  }

  // As World's; none where ranks don't share memory.
  virtual std::optional<shm::Group> machine_group() { return std::nullopt; }

  // This rank has failed: the others find out now and not at their deadline. From any thread. Nothing where there are no
  // others, or the closed connection tells them.
  virtual void fail(const std::string& /*reason*/) {}
};

class CallQueue;

// The two that carry CPU tensors between ranks.
class CpuTransport : public Transport {
 public:
  // What makes the collectives. run() out of one of them makes another one at once, inside it.
  virtual CallQueue& queue() = 0;

  // Of every wait from now on, after the calls that were started before.
  virtual void set_timeout(std::chrono::milliseconds timeout) = 0;
};

// The transport of a world of one rank: the result is what that rank gives.
std::unique_ptr<Transport> make_self();

class GlooNetwork;

struct TransportOptions {
  int rank = 0;
  int size = 1;
  std::string describe;               // "rank 2 of 4 on gpu-a", for messages
  std::string address = "127.0.0.1";  // of this machine, as the other ranks reach it; GLOO_SOCKET_IFNAME goes first
  std::chrono::milliseconds timeout = kDefaultTimeout;
  std::shared_ptr<GlooNetwork> network{};  // that a group shares with its World; none: a new one
  bool message_headers = true;  // a message between machines begins with its dtype and length (gloo_messages.h)
};

}  // namespace lockstep
