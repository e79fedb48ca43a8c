// collective/transport.h: what carries a World's collectives. World chooses one for each kind of tensor.
//
//   shared memory   host tensors, all ranks on one machine (or threads of one process): collective/shm/
//   Gloo            host tensors, ranks on several machines
//   NCCL            CUDA tensors
//
// Owns:    its connections, until it is destroyed
// Threads: one at a time
// Ranks:   every rank makes the same calls in the same order
#pragma once

#include <torch/types.h>

#include <chrono>
#include <memory>
#include <optional>
#include <string>

#include "lockstep/collective/shm/group.h"
#include "lockstep/collective/world.h"

namespace lockstep {

class Transport {
 public:
  virtual ~Transport() = default;

  // As World's calls of the same name; tensors are contiguous.
  virtual Work all_reduce_async(const torch::Tensor& tensor, ReduceOp op) = 0;
  virtual void broadcast(const torch::Tensor& tensor, int root) = 0;
  virtual torch::Tensor all_gather(const torch::Tensor& tensor) = 0;
  virtual torch::Tensor allocate(torch::IntArrayRef sizes, const torch::TensorOptions& options) = 0;

  // As World's; none where ranks don't share memory.
  virtual std::optional<shm::Group> machine_group() = 0;

  // This rank has failed: the others shall find out now and not at their deadline.
  virtual void fail(const std::string& reason) = 0;
};

struct TransportOptions {
  int rank = 0;
  int size = 1;
  std::string describe;                // "rank 2 of 4 on gpu-a", for messages
  std::string address = "127.0.0.1";   // of this machine, as the other ranks reach it; GLOO_SOCKET_IFNAME goes first
  std::chrono::milliseconds timeout = std::chrono::minutes(5);
};

}  // namespace lockstep
