// collective/transport.h: what carries a World's collectives. World chooses one for each kind of tensor.
//
//   shared memory   host tensors, all ranks on one machine (or threads of one process): collective/shm/
//   hierarchy       host tensors, ranks on several machines: shared memory inside each, Gloo between them
//   NCCL            CUDA tensors
//   itself          a world of one rank
//
// Owns:    its connections, until it is destroyed; what was started must not be used after that
// Threads: one at a time
// Ranks:   every rank makes the same calls in the same order, except send and receive
#pragma once

#include <torch/types.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/collective/shm/group.h"
#include "lockstep/deadline.h"
#include "lockstep/world.h"

namespace lockstep {

// One collective. Tensors are dense and without gaps; input and output are the same memory or have none in common.
struct Collective {
  Operation operation = Operation::kBarrier;
  torch::Tensor input;   // scatter: at root only
  torch::Tensor output;  // reduce and gather: at root only
  // Elements of each rank's part, where parts differ: all_to_all has both lists, reduce_scatter and all_gather the
  // first.
  std::vector<std::int64_t> counts{};
  std::vector<std::int64_t> receive_counts{};
  ReduceOp op = ReduceOp::kSum;
  int root = 0;
  Algorithm algorithm = Algorithm::kDirect;
};

// A call that was started; as Work's functions of the same name.
class Pending {
 public:
  virtual ~Pending() = default;
  virtual void wait() = 0;
  virtual void wait(Deadline deadline) = 0;
  virtual bool done() = 0;
  virtual int source() const { return kAnyRank; }
};

using RankLists = std::vector<std::vector<int>>;

class Transport {
 public:
  virtual ~Transport() = default;

  virtual std::shared_ptr<Pending> start(Collective call) = 0;
  virtual void run(const Collective& call) { start(call)->wait(); }

  virtual std::shared_ptr<Pending> start_send(const torch::Tensor& tensor, int to, int tag) = 0;
  virtual std::shared_ptr<Pending> start_receive(const torch::Tensor& tensor, int from, int tag) = 0;
  virtual void send(const torch::Tensor& tensor, int to, int tag) { start_send(tensor, to, tag)->wait(); }
  virtual int receive(const torch::Tensor& tensor, int from, int tag) {
    const auto message = start_receive(tensor, from, tag);
    message->wait();
    return message->source();
  }

  // The transport of the sub-world of lists[rank], none for a rank whose list is empty. Every rank calls it, with the
  // same lists: all ranks of a list have that list, and no rank is in two.
  virtual std::unique_ptr<Transport> group(const RankLists& lists) = 0;

  // The same with connections of its own: neither is lost with the other. `timeout`: of this rank's waits.
  virtual std::unique_ptr<Transport> separate(const RankLists& lists, std::chrono::milliseconds timeout) = 0;

  virtual torch::Tensor allocate(torch::IntArrayRef sizes, const torch::TensorOptions& options) {
    return torch::empty(sizes, options);
  }

  // As World's; none where ranks don't share memory.
  virtual std::optional<shm::Group> machine_group() { return std::nullopt; }

  // This rank has failed: the others shall find out now and not at their deadline. From any thread.
  virtual void fail(const std::string& reason) = 0;
};

struct TransportOptions {
  int rank = 0;
  int size = 1;
  std::string describe;               // "rank 2 of 4 on gpu-a", for messages
  std::string address = "127.0.0.1";  // of this machine, as the other ranks reach it; GLOO_SOCKET_IFNAME goes first
  std::chrono::milliseconds timeout = std::chrono::minutes(5);
  bool bare_messages = false;  // between machines nobody checks their lengths: gloo_messages.h
};

}  // namespace lockstep
