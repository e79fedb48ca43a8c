// collective/world.h: the ranks of a job, and what they can do together.
//
// Flow:    launch/ says which rank this is -> World -> gradient/ and strategy/ exchange tensors through it
// Owns:    the connections between the ranks, until the last copy of the World is gone
// Threads: a World is a value; copies share one state. Call it from one thread at a time
// Ranks:   unless it says otherwise every rank must make each call, in the same order
#pragma once

#include <torch/types.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/base/cores.h"

namespace lockstep {

struct JobEnvironment;
class WorldState;

namespace shm {
class Group;
}

enum class ReduceOp { kSum, kMin, kMax };

struct WorldOptions {
  torch::DeviceType device = torch::kCPU;                       // kCUDA: GPU local_rank of those that are visible
  std::chrono::milliseconds timeout = std::chrono::minutes(5);  // how long any one wait may take
};

// A collective that is under way.
class Work {
 public:
  // Blocks until the collective is done, at most for the world's timeout.
  // Throws PeerLost: a rank died, or the time is over. The world is of no use after that.
  void wait();

  using Waiter = std::function<void()>;
  explicit Work(Waiter waiter) : waiter_(std::move(waiter)) {}

 private:
  Waiter waiter_;
};

class World {
 public:
  // The world of the launcher's variables (launch/environment.h lists them); none set: one rank.
  // Blocks until all ranks are connected. Throws EnvironmentError, RendezvousError (who is missing, port in use),
  // DeviceError (no such GPU). S1.
  static World from_env(const WorldOptions& options = {});
  static World single(const WorldOptions& options = {});

  int rank() const;
  int size() const;
  int local_rank() const;
  int local_size() const;  // ranks on this machine
  int node_rank() const;
  torch::Device device() const;  // where this rank's tensors belong; torch knows one "cpu", cores() says which part of it
  const CoreSet& cores() const;  // the cores this rank may use
  std::string describe() const;  // "rank 2 of 4 on gpu-a"

  // Reduces in place: afterwards every rank holds the same bits. tensor: any shape, contiguous, the same shape and dtype
  // on all ranks, on device() or on the CPU. Between machines it sends 2(N-1)/N * K per rank (ring) for K bytes; within
  // one it sends nothing and reads and writes K per rank.
  // Throws UsageError (not contiguous), DeviceError (elsewhere than where this world exchanges), MismatchError (ranks
  // that give different shapes or make different calls), PeerLost.
  void all_reduce(const torch::Tensor& tensor, ReduceOp op = ReduceOp::kSum) const;

  // The same, without blocking. The tensor must not be touched until the Work was waited for. Within one machine the exchange takes place in the wait (docs/design/exchange.md says why).
  [[nodiscard]] Work all_reduce_async(const torch::Tensor& tensor, ReduceOp op = ReduceOp::kSum) const;

  // Every rank's tensor becomes root's. tensor: as for all_reduce. Sends at most K log2(N) from the root.
  void broadcast(const torch::Tensor& tensor, int root = 0) const;

  // The tensors of all ranks in rank order, shape (N, ...). tensor: as for all_reduce.
  [[nodiscard]] torch::Tensor all_gather(const torch::Tensor& tensor) const;

  // An uninitialised tensor whose collectives copy nothing: where the ranks of a machine share memory, it lies where the
  // others can read it. It may outlive the world. Elsewhere, torch::empty. Throws SystemError: no memory left.
  [[nodiscard]] torch::Tensor allocate(torch::IntArrayRef sizes, const torch::TensorOptions& options) const;

  // Returns once every rank has called it.
  void barrier() const;

  // Every rank's text in rank order. Texts may differ in length: for what has to agree before tensors are exchanged.
  // Throws PeerLost; RendezvousError naming the ranks that did not come.
  [[nodiscard]] std::vector<std::string> exchange_texts(const std::string& topic, const std::string& mine) const;

  // A group of its own of the ranks on this machine that share memory; none where they can't, and in a world of one.
  // What collective/shared_memory.h builds on. Throws PeerLost.
  std::optional<shm::Group> machine_group() const;

 private:
  friend void run_ranks(int ranks, const std::function<void(World&)>& body, const WorldOptions& options);
  explicit World(std::shared_ptr<WorldState> state) : state_(std::move(state)) {}
  void connect() const;
  std::shared_ptr<WorldState> state_;
};

// Runs `body` once per rank, each rank a thread of this process with its own share of the cores, and returns when all
// are done. An exception in one rank closes its connections, which fails the collectives of the others; the first
// exception is then thrown here. For tests, for strategies with a thread per device, and where processes are not wanted.
void run_ranks(int ranks, const std::function<void(World&)>& body, const WorldOptions& options = {});

// Throws DeviceError naming `name` unless the tensor is where the call needs it; nothing has reached the device by then.
void require_device(const torch::Tensor& tensor, torch::Device device, const std::string& name);

}  // namespace lockstep
