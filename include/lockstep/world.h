// lockstep/world.h: the ranks of a job, and what they can do together.
//
// Flow:    launch/ says which rank this is -> World -> gradient/ and strategy/ exchange tensors through it
// Owns:    the connections between the ranks, until the last copy of the World, and of its Works, is gone
// Threads: a World is a value; copies share one state. Call it from one thread at a time. A sub-world is a World of its
//          own: it may be used while another thread uses its parent
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

#include "lockstep/collective_types.h"
#include "lockstep/cores.h"
#include "lockstep/deadline.h"

namespace lockstep {

struct JobEnvironment;
struct TensorCall;
class WorldState;

namespace shm {
class Group;
}

struct WorldOptions {
  torch::DeviceType device = torch::kCPU;                       // kCUDA: GPU local_rank of those that are visible
  std::chrono::milliseconds timeout = std::chrono::minutes(5);  // how long any one wait may take
};

// A call that is under way. Copies are the same call.
//
// Collectives of a world go together in the order in which they were started on each rank, whichever is waited for
// first. Several may be under way; no tensor in two of them. A blocking call comes after all that were started before
// it. Messages have no order with respect to collectives. A Work that is dropped without a wait is carried out like any
// other; its tensors live until then.
//
// Within one machine a collective begins when somebody waits for it or for a later one, makes a blocking call or turns
// to messages, on the thread that does so; done() and wait(deadline) begin it on a thread beside.
// docs/design/exchange.md says why. So wait for what is under way in one world before you block in another one of the
// same ranks, and for everything before the world goes: what nobody waited for by then is not carried out, and the
// peers get PeerLost.
class Work {
 public:
  // Blocks until the call is done, at most for the world's timeout. Throws what went wrong with it, each time: PeerLost
  // (a rank died, or the time is over; the world is of no use after that), MismatchError.
  void wait();

  // The same, but at the deadline throws PeerLost and leaves the call going on: it can be waited for again.
  void wait(Deadline deadline);
  void wait(std::chrono::milliseconds longest) { wait(Deadline::after(longest)); }

  bool done();  // well or not; never blocks

  // What the call gives, once it was waited for: the tensor that it was given, or its output. An undefined tensor where
  // this rank gets none. Throws UsageError before that.
  const torch::Tensor& result() const;

  int source() const;  // of a receive that was waited for: who sent it

 private:
  friend class World;
  struct State;
  explicit Work(std::shared_ptr<State> state) : state_(std::move(state)) {}
  std::shared_ptr<State> state_;
};

// `output`, in all of these: a tensor of the result's shape and dtype to write the result to; undefined: a new one.
// `rows`: entries of the first dimension, one count per rank; none: as many for each rank.
struct AllReduceOptions {
  ReduceOp op = ReduceOp::kSum;
  Algorithm algorithm = Algorithm::kDirect;  // others, for study; kCentral, kTree: only where all ranks share memory
};
struct ReduceOptions {
  ReduceOp op = ReduceOp::kSum;
  int root = 0;
};
struct ReduceScatterOptions {
  ReduceOp op = ReduceOp::kSum;
  std::vector<std::int64_t> rows{};  // of each rank's part
  torch::Tensor output{};
};
struct AllGatherOptions {
  torch::Tensor output{};
};
struct AllGatherRowsOptions {
  std::vector<std::int64_t> rows{};  // of each rank's tensor; none: they are exchanged first
  torch::Tensor output{};
};
struct AllToAllOptions {
  std::vector<std::int64_t> send_rows{};     // to each rank
  std::vector<std::int64_t> receive_rows{};  // from each rank; none beside send_rows: they are exchanged first
  torch::Tensor output{};
};
struct ReceiveOptions {
  int from = kAnyRank;
  int tag = 0;
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
  torch::Device device()
      const;  // where this rank's tensors belong; torch knows one "cpu", cores() says which part of it
  const CoreSet& cores() const;  // the cores this rank may use
  std::string describe() const;  // "rank 2 of 4 on gpu-a"

  // ---- Sub-worlds
  //
  // Every rank of this world calls; connections are made before it returns. Ranks are numbered anew, so are local ranks
  // and nodes. A sub-world may be used at the same time as its parent, from another thread, and outlive it. When one
  // rank is lost, so is it for all worlds it was in.

  // The world of `ranks`, in that order; nothing for a rank that is not among them. Lists of different ranks are equal
  // or have no rank in common, so that one call can make many. Throws UsageError (a rank twice, or none such),
  // MismatchError naming two ranks whose lists contradict each other.
  [[nodiscard]] std::optional<World> group(const std::vector<int>& ranks) const;

  // The same, but with connections of its own: it goes on when a rank that is not in it is lost, and when one of its
  // own is lost, this world goes on for the others. What server and worker of a parameter server are connected by.
  // timeout: of this rank's waits in it, which may differ between ranks; 0: as in this world. Its messages are for
  // ranks that know their lengths: between machines they go as they are, and one that is longer than expected ends
  // the process.
  [[nodiscard]] std::optional<World> separate(const std::vector<int>& ranks,
                                              std::chrono::milliseconds timeout = {}) const;

  // One world for each color, its ranks in the order of `key`, then of their ranks here; nothing for color < 0.
  // (MPI_Comm_split.)
  [[nodiscard]] std::optional<World> split(int color, int key = 0) const;

  // ---- Collectives
  //
  // Notation: N ranks, K bytes of the tensor that each rank gives. Tensors: any shape, layout with gaps or without,
  // empty ones too; the same dtype on all ranks, one of float32/64/16, bfloat16, int8/16/32/64, uint8, bool; on
  // device() or on the CPU. A tensor with gaps is copied in and out. Sums are taken in rank order, so every rank has
  // the same bits in every run. Within one machine nothing is sent (docs/design/shared-memory.md).
  //
  // They throw UsageError (arguments that make no sense), DeviceError (a tensor elsewhere than where this world
  // exchanges), MismatchError (ranks that make different calls or give different shapes; no data has moved, and
  // within one machine the world stays usable), PeerLost. x_async does not block: the tensors must not be touched
  // until the Work was waited for.

  // Reduces in place: afterwards every rank has the result. tensor: the same shape everywhere.
  // Sends 2(N-1)/N * K from each rank.
  void all_reduce(const torch::Tensor& tensor, const AllReduceOptions& options = {}) const;
  void all_reduce(const torch::Tensor& tensor, ReduceOp op) const { all_reduce(tensor, {.op = op}); }
  [[nodiscard]] Work all_reduce_async(const torch::Tensor& tensor, const AllReduceOptions& options = {}) const;

  // The same, but only root's tensor changes. Sends about K from each rank.
  void reduce(const torch::Tensor& tensor, const ReduceOptions& options = {}) const;

  // sum_j w_j t_j / sum_j w_j, in place: tensor as for all_reduce, of floating point. float16 and bfloat16 are summed
  // in float32. The tensor of a rank with weight 0 counts as zeros, whatever it holds. Throws UsageError: weights < 0,
  // or all 0.
  void weighted_mean(const torch::Tensor& tensor, double weight) const;

  // Reduces tensors of shape (R, ...) and gives rank r its part, shape (rows[r], ...); R = sum(rows), or a multiple of
  // N. Sends (N-1)/N * K from each rank.
  [[nodiscard]] torch::Tensor reduce_scatter(const torch::Tensor& tensor,
                                             const ReduceScatterOptions& options = {}) const;
  [[nodiscard]] Work reduce_scatter_async(const torch::Tensor& tensor, const ReduceScatterOptions& options = {}) const;

  // The tensors of all ranks in rank order, shape (N, ...). tensor: the same shape everywhere. Sends (N-1) * K.
  [[nodiscard]] torch::Tensor all_gather(const torch::Tensor& tensor, const AllGatherOptions& options = {}) const;
  [[nodiscard]] Work all_gather_async(const torch::Tensor& tensor, const AllGatherOptions& options = {}) const;

  // The tensors of all ranks one after the other: shapes (rows[r], ...) give (sum(rows), ...).
  [[nodiscard]] torch::Tensor all_gather_rows(const torch::Tensor& tensor,
                                              const AllGatherRowsOptions& options = {}) const;

  // Every rank's tensor becomes root's. Sends at most K log2(N) from the root.
  void broadcast(const torch::Tensor& tensor, int root = 0) const;
  [[nodiscard]] Work broadcast_async(const torch::Tensor& tensor, int root = 0) const;

  // At root the tensors of all ranks in rank order, shape (N, ...); elsewhere an undefined tensor. Sends K.
  [[nodiscard]] torch::Tensor gather(const torch::Tensor& tensor, int root = 0) const;

  // Entry r of root's `parts`, shape (N, ...), goes into rank r's `output`, shape (...). `parts` counts at root only.
  void scatter(const torch::Tensor& parts, const torch::Tensor& output, int root = 0) const;

  // Rows of a tensor (R, ...) go to the ranks, send_rows[r] of them to rank r, in rank order; what comes back are the
  // rows from all ranks, in rank order, shape (sum(receive_rows), ...). Sends (N-1)/N * K.
  [[nodiscard]] torch::Tensor all_to_all(const torch::Tensor& tensor, const AllToAllOptions& options = {}) const;
  [[nodiscard]] Work all_to_all_async(const torch::Tensor& tensor, const AllToAllOptions& options = {}) const;

  // Returns once every rank has called it.
  void barrier() const;

  // ---- Messages, between two ranks
  //
  // Those of one sender with one tag (>= 0) arrive in the order in which they were sent. A send may block until the
  // message is received. Both sides give as many elements of one dtype: else the receiver gets MismatchError, and the
  // message is dropped. Throw as collectives do, and UsageError: to this rank itself; between machines, a tag above
  // 2^30 - 1.
  void send(const torch::Tensor& tensor, int to, int tag = 0) const;
  [[nodiscard]] Work send_async(const torch::Tensor& tensor, int to, int tag = 0) const;

  // Returns who sent it. From any rank: within one machine a dead rank is noticed at once, between machines at the
  // timeout. NCCL has no receive from any rank.
  int receive(const torch::Tensor& tensor, const ReceiveOptions& options = {}) const;
  [[nodiscard]] Work receive_async(const torch::Tensor& tensor, const ReceiveOptions& options = {}) const;

  // ---- Others

  // An uninitialised tensor whose collectives copy nothing: where the ranks of a machine share memory, it lies where
  // the others can read it. It may outlive the world. Elsewhere, torch::empty. Throws SystemError: no memory left.
  [[nodiscard]] torch::Tensor allocate(torch::IntArrayRef sizes, const torch::TensorOptions& options) const;

  // This rank gives up: all that wait in this world, here and elsewhere, get PeerLost, with `reason` within one
  // machine. The world is of no use after that. From any thread.
  void abandon(const std::string& reason) const;

  // Every rank's text in rank order. Texts may differ in length: for what has to agree before tensors are exchanged.
  // Throws PeerLost; RendezvousError naming the ranks that did not come.
  [[nodiscard]] std::vector<std::string> exchange_texts(const std::string& topic, const std::string& mine) const;

  // A group of its own of the ranks on this machine that share memory; none where they can't, and in a world of one.
  // What collective/shared_memory.h builds on. Throws PeerLost.
  std::optional<shm::Group> machine_group() const;

 private:
  friend class WorldState;
  explicit World(std::shared_ptr<WorldState> state) : state_(std::move(state)) {}
  std::vector<std::vector<int>> agree_on_lists(const std::vector<int>& ranks) const;
  torch::Tensor run(const TensorCall& call) const;
  Work start(TensorCall call) const;
  std::shared_ptr<WorldState> state_;
};

// Runs `body` once per rank, each rank a thread of this process with its own share of the cores, and returns when all
// are done. An exception in one rank closes its connections, which fails the collectives of the others; the first
// exception is then thrown here. For tests, for strategies with a thread per device, and where processes are not
// wanted.
void run_ranks(int ranks, const std::function<void(World&)>& body, const WorldOptions& options = {});

// Throws DeviceError naming `name` unless the tensor is where the call needs it; nothing has reached the device by
// then.
void require_device(const torch::Tensor& tensor, torch::Device device, const std::string& name);

}  // namespace lockstep
