// SPDX-License-Identifier: Apache-2.0
// lockstep/world.h: the ranks of a job: who they are, and how they exchange tensors.
//
// Flow:    agent/ says which rank this is -> World -> step/ and strategy/ exchange tensors through it
// Owns:    the connections between the ranks, until the last copy of the World and of its Works is gone
// Threads: a World is a value; its copies share one state. Use it from one thread at a time. A sub-world is a World of
//          its own: another thread may use it at the same time as its parent
// Ranks:   unless stated otherwise, every rank makes each call, in the same order
#pragma once

#include <memory>
#include <optional>

#include "lockstep/collective_types.h"
#include "lockstep/cores.h"
#include "lockstep/deadline.h"
#include "lockstep/named_tensor.h"

namespace lockstep {

struct JobEnvironment;
struct TensorCall;
class WorldState;

namespace shm {
class Group;
}

struct WorldOptions {
  torch::Device device = torch::kCPU;      // kCUDA without a number: GPU local_rank of those that are visible
  milliseconds timeout = kDefaultTimeout;  // how long any one wait may take; at most 24 days
};

// A call that was started. Copies refer to the same call.
//
// Order: the collectives of a world run in the order in which they were started, whichever is waited for first. A
// blocking collective runs after all those started before it. Messages are not ordered with respect to collectives.
//
// Memory: a call under way keeps its tensors alive. Do not touch them until it was waited for, and do not use a tensor
// in two calls under way.
//
// Progress: within one machine, async collectives are deferred. They run on the calling thread at the next wait() or
// blocking call; done() and wait(deadline) hand them to a worker thread (docs/design/exchange.md explains why). So
// before you block in another world of the same ranks, wait for what is under way in this one. Dropping a Work is fine:
// the call still runs at the next wait or blocking call. Collectives that were not waited for when the world is
// destroyed never run, and the peers get PeerLost.
class Work {
 public:
  // Blocks until the call is done, at most for the world's timeout. Throws the call's error, each time: PeerLost (a rank
  // died or timed out; the world can't be used after that), MismatchError.
  void wait();

  // The same, but throws PeerLost at the deadline; the call goes on and can be waited for again.
  void wait(Deadline deadline);
  void wait(milliseconds longest) { wait(Deadline::after(longest)); }

  bool done();  // finished, with or without an error; never blocks

  // The result, after wait(): the tensor that was passed in, or the output. Undefined where this rank gets none. Throws
  // UsageError before wait().
  const Tensor& result() const;

  int source() const;  // of a receive, after wait(): the rank that sent it

 private:
  friend class World;
  struct State;
  explicit Work(std::shared_ptr<State> state) : state_(std::move(state)) {}
  std::shared_ptr<State> state_;
};

// `output`, in all of these: a tensor of the result's shape and dtype that receives the result; undefined: a new one.
// `rows`: sizes of the first dimension, one per rank; empty: the same for each rank.
struct AllReduceOptions {
  ReduceOp op = ReduceOp::kSum;
  Algorithm algorithm = Algorithm::kFastest;  // kCentral, kTree: ranks of one machine only
};
struct ReduceOptions {
  ReduceOp op = ReduceOp::kSum;
  int root = 0;
};
struct ReduceScatterOptions {
  ReduceOp op = ReduceOp::kSum;
  std::vector<int64_t> rows{};  // of each rank's part
  Tensor output{};
};
struct AllGatherOptions {
  Tensor output{};
};
struct AllGatherRowsOptions {
  std::vector<int64_t> rows{};  // of each rank's tensor; empty: exchanged first
  Tensor output{};
};
struct AllToAllOptions {
  std::vector<int64_t> send_rows{};     // to each rank
  std::vector<int64_t> receive_rows{};  // from each rank; empty beside send_rows: exchanged first
  Tensor output{};
};
struct ReceiveOptions {
  int from = kAnyRank;
  int tag = 0;
};

class World {
 public:
  // The world described by the launcher's environment variables (agent/clusters/environment.h lists them); none set: one rank.
  // Blocks until all ranks are connected. Throws EnvironmentError, RendezvousError (ranks missing, port in use),
  // DeviceError (no such GPU).
  static World from_env(const WorldOptions& options = {});
  static World single(const WorldOptions& options = {});

  int rank() const;
  int size() const;
  int local_rank() const;
  int local_size() const;  // ranks on this machine
  int node_rank() const;
  torch::Device device() const;  // where this rank's tensors belong; for "cpu", cores() says which cores
  const CoreSet& cores() const;  // the cores this rank may use
  std::string describe() const;  // "rank 2 of 4 on gpu-a"
  milliseconds timeout() const;  // how long any one wait may take

  // ---- Sub-worlds
  //
  // Every rank of this world calls, and blocks until the connections are made. Ranks, local ranks and nodes are numbered
  // anew. A sub-world may be used from another thread at the same time as its parent, and may outlive it. A rank that is
  // lost is lost in all worlds that it belongs to.

  // The world of `ranks`, in that order; none for a rank that is not in its own list. The lists of two ranks are equal
  // or disjoint, so one call can make several sub-worlds. Throws UsageError (a rank twice, an unknown rank),
  // MismatchError naming two ranks whose lists contradict each other.
  [[nodiscard]] std::optional<World> group(const std::vector<int>& ranks) const;

  // The same, but with connections of its own: it survives the loss of ranks that are not in it, and this world survives
  // the loss of ranks in it. A parameter server connects its workers this way. timeout: of this rank's waits in it, which
  // may differ between ranks; 0: as in this world. Between machines its messages carry no length header: a message that
  // is longer than the receiver expects ends the process.
  [[nodiscard]] std::optional<World> separate(const std::vector<int>& ranks, milliseconds timeout = {}) const;

  // One world for each color, its ranks ordered by `key`, then by their rank here; none for color < 0. (MPI_Comm_split.)
  [[nodiscard]] std::optional<World> split(int color, int key = 0) const;

  // ---- Collectives
  //
  // Notation: N ranks, K bytes of the tensor that each rank gives. Tensors: any shape, with or without gaps, also empty;
  // on all ranks the same dtype, one of float32/64/16, bfloat16, int8/16/32/64, uint8, bool; on device() or on the CPU.
  // A tensor with gaps is copied in and out. Sums are taken in rank order, around a ring from another rank for each part:
  // all ranks get the same bits in every run. Within one machine nothing is sent (docs/design/shared-memory.md).
  //
  // They throw UsageError (invalid arguments), DeviceError (a tensor on a device where this world can't exchange it),
  // MismatchError (ranks that make different calls or give different shapes; no data has moved, and within one machine
  // the world stays usable), PeerLost. x_async does not block.

  // Reduces in place: afterwards every rank has the result. tensor: the same shape everywhere.
  // Sends 2(N-1)/N * K from each rank.
  void all_reduce(const Tensor& tensor, const AllReduceOptions& options = {}) const;
  void all_reduce(const Tensor& tensor, ReduceOp op) const { all_reduce(tensor, {.op = op}); }
  [[nodiscard]] Work all_reduce_async(const Tensor& tensor, const AllReduceOptions& options = {}) const;

  // The same, but only root's tensor changes. Sends about K from each rank.
  void reduce(const Tensor& tensor, const ReduceOptions& options = {}) const;

  // Reduces tensors of shape (R, ...) and gives rank r its part, shape (rows[r], ...). R = sum(rows); without rows, R is
  // a multiple of N. Sends (N-1)/N * K from each rank.
  [[nodiscard]] Tensor reduce_scatter(const Tensor& tensor, const ReduceScatterOptions& options = {}) const;
  [[nodiscard]] Work reduce_scatter_async(const Tensor& tensor, const ReduceScatterOptions& options = {}) const;

  // The tensors of all ranks in rank order, shape (N, ...). tensor: the same shape everywhere. Sends (N-1) * K.
  [[nodiscard]] Tensor all_gather(const Tensor& tensor, const AllGatherOptions& options = {}) const;
  [[nodiscard]] Work all_gather_async(const Tensor& tensor, const AllGatherOptions& options = {}) const;

  // The tensors of all ranks, concatenated in rank order: shapes (rows[r], ...) give (sum(rows), ...).
  [[nodiscard]] Tensor all_gather_rows(const Tensor& tensor, const AllGatherRowsOptions& options = {}) const;

  // Copies root's tensor into every rank's. Sends at most K log2(N) from the root.
  void broadcast(const Tensor& tensor, int root = 0) const;
  [[nodiscard]] Work broadcast_async(const Tensor& tensor, int root = 0) const;

  // At root the tensors of all ranks in rank order, shape (N, ...); elsewhere an undefined tensor. Sends K.
  [[nodiscard]] Tensor gather(const Tensor& tensor, int root = 0) const;

  // Copies entry r of root's `parts`, shape (N, ...), into rank r's `output`, shape (...). `parts` is read at root only.
  void scatter(const Tensor& parts, const Tensor& output, int root = 0) const;

  // Sends the rows of a tensor (R, ...) to the ranks in rank order, send_rows[r] of them to rank r. Returns the rows from
  // all ranks, in rank order, shape (sum(receive_rows), ...). Sends (N-1)/N * K.
  [[nodiscard]] Tensor all_to_all(const Tensor& tensor, const AllToAllOptions& options = {}) const;
  [[nodiscard]] Work all_to_all_async(const Tensor& tensor, const AllToAllOptions& options = {}) const;

  // Blocks until every rank has called it.
  void barrier() const;

  // ---- Messages, between two ranks
  //
  // Messages of one sender with one tag (>= 0) arrive in the order in which they were sent. A send may block until the
  // message is received. Both sides give the same number of elements of one dtype; otherwise the receiver gets
  // MismatchError and the message is dropped. They throw what collectives throw, and UsageError: a message to this rank
  // itself; between machines, a tag above 2^30 - 1.
  void send(const Tensor& tensor, int to, int tag = 0) const;
  [[nodiscard]] Work send_async(const Tensor& tensor, int to, int tag = 0) const;

  // Returns the rank that sent it. A receive from any rank notices a dead rank at once within one machine, at the timeout
  // between machines. NCCL has no receive from any rank.
  int receive(const Tensor& tensor, const ReceiveOptions& options = {}) const;
  [[nodiscard]] Work receive_async(const Tensor& tensor, const ReceiveOptions& options = {}) const;

  // ---- Others

  // An uninitialised tensor that the other ranks of this machine read in place, so that its collectives copy nothing. It
  // may outlive the world. Where ranks share no memory, torch::empty. Throws SystemError: no memory left.
  [[nodiscard]] Tensor allocate(torch::IntArrayRef sizes, const torch::TensorOptions& options) const;

  // This rank gives up: every rank that waits in this world gets PeerLost, within one machine with `reason`. The world
  // can't be used after that. From any thread.
  void abandon(const std::string& reason) const;

  // Every rank's text in rank order; texts may differ in length. For settings that must agree before tensors are
  // exchanged. Throws PeerLost.
  [[nodiscard]] std::vector<std::string> exchange_texts(const std::string& mine) const;

  // A group of the ranks on this machine that share memory, apart from this world's own; none where they can't, and in a
  // world of one. For collective/shared_memory.h. Throws PeerLost.
  std::shared_ptr<shm::Group> machine_group() const;

 private:
  friend class WorldState;
  explicit World(std::shared_ptr<WorldState> state) : state_(std::move(state)) {}
  std::optional<World> sub_world(const std::vector<int>& ranks, std::optional<milliseconds> separate) const;
  Tensor run(const TensorCall& call) const;
  Work start(TensorCall call) const;
  std::shared_ptr<WorldState> state_;
};

// Runs `body` once per rank, each rank a thread of this process with its own share of the cores. Blocks until all are
// done. An exception in one rank fails the collectives of the others; the first one is then thrown here. For tests, and
// for strategies with a thread per device.
void run_ranks(int ranks, const std::function<void(World&)>& body, const WorldOptions& options = {});

// Throws DeviceError naming `name` unless the tensor is on `device`, before anything reaches the device.
void require_device(const Tensor& tensor, torch::Device device, const std::string& name);

}  // namespace lockstep
