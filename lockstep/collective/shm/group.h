// collective/shm/group.h: the ranks of one machine exchange memory: the collectives, in shared memory, without torch.
//
// Flow:    rendezvous.h gives a Group of all ranks of the machine -> collectives -> subgroup() for some of them
// Owns:    Group: this rank's side of the group, its worker thread once a call was started without blocking, its share
//          of the machine's mappings. Pointers in calls stay the caller's
// Threads: one thread at a time per Group; different Groups at the same time. allocate() from any thread
// Ranks:   every rank of the group makes the same calls in the same order, except send and receive
//
// Notation: p ranks, K bytes of data per rank. A call blocks until its result is there and its memory is no longer
// read by anyone. What a call costs:
//
//   data lies in                 all_reduce                                             waits
//   slots (small)                every rank reads p*K, writes K                         1
//   arenas, or ranks as threads  every rank reads K (K/p of each), writes K             2
//   any other memory             the same, plus K written to and 2*K*(p-1)/p read from
//                                staging memory                                         1 per chunk
//
// Memory from allocate() is read by peers where it lies. All other memory is staged in chunks, unless ranks are
// threads. Input and output of a call may be the same memory, or must not overlap; all_to_all needs two.
//
// Throws, from every call: MismatchError on all ranks if they want different things (the group stays usable);
// PeerLost if a rank died, left, failed or did not come before the timeout (no group of the machine is usable any more,
// and every rank finds out within 100 ms); UsageError for arguments that make no sense; SystemError if the machine
// refuses memory.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "lockstep/collective/shm/memory/arena.h"
#include "lockstep/collective_types.h"
#include "lockstep/deadline.h"

namespace lockstep::shm {

// Counts are elements, zero allowed. `counts`, where there is one, has an entry per rank and replaces `count`.
struct Barrier {};
struct AllReduce {
  const void* input = nullptr;
  void* output = nullptr;
  std::size_t count = 0;
  DType dtype = DType::kFloat32;
  ReduceOp op = ReduceOp::kSum;
  Algorithm algorithm = Algorithm::kDirect;
};
struct Reduce {
  const void* input = nullptr;
  void* output = nullptr;  // root only
  std::size_t count = 0;
  DType dtype = DType::kFloat32;
  ReduceOp op = ReduceOp::kSum;
  int root = 0;
};
struct ReduceScatter {  // input: the parts of all ranks one after the other; output: the own part
  const void* input = nullptr;
  void* output = nullptr;
  std::size_t count = 0;  // of a part
  std::vector<std::size_t> counts{};
  DType dtype = DType::kFloat32;
  ReduceOp op = ReduceOp::kSum;
};
struct AllGather {  // input: the own part; output: the parts of all ranks one after the other
  const void* input = nullptr;
  void* output = nullptr;
  std::size_t count = 0;  // of a part
  std::vector<std::size_t> counts{};
  DType dtype = DType::kFloat32;
};
struct Broadcast {
  void* data = nullptr;
  std::size_t count = 0;
  DType dtype = DType::kFloat32;
  int root = 0;
};
struct Gather {
  const void* input = nullptr;
  void* output = nullptr;  // root only
  std::size_t count = 0;   // of a part
  std::vector<std::size_t> counts{};
  DType dtype = DType::kFloat32;
  int root = 0;
};
struct Scatter {
  const void* input = nullptr;  // root only
  void* output = nullptr;
  std::size_t count = 0;  // of a part
  std::vector<std::size_t> counts{};
  DType dtype = DType::kFloat32;
  int root = 0;
};
struct AllToAll {  // input: a part for each rank one after the other; output: a part from each rank likewise
  const void* input = nullptr;
  void* output = nullptr;
  std::size_t count = 0;                   // of a part
  std::vector<std::size_t> send_counts{};  // both or neither
  std::vector<std::size_t> receive_counts{};
  DType dtype = DType::kFloat32;
};

// Messages between two ranks. Those of one sender with one tag are received in the order in which they were sent.
// send() returns at once if the data fits a letter (832 bytes) and one of four is free, else once it was received.
struct Send {
  const void* data = nullptr;
  std::size_t count = 0;
  DType dtype = DType::kFloat32;
  int to = 0;
  std::int64_t tag = 0;
};
struct Receive {
  void* data = nullptr;
  std::size_t count = 0;
  DType dtype = DType::kFloat32;
  int from = kAnyRank;
  std::int64_t tag = 0;
};

using Call = std::variant<Barrier, AllReduce, Reduce, ReduceScatter, AllGather, Broadcast, Gather, Scatter, AllToAll,
                          Send, Receive>;

struct Intent;  // control_block.h
struct WorkState;

// A call that was started. Copies are the same call.
class Work {
 public:
  bool done() const;  // finished, well or not

  // Blocks until the call is finished and throws what it threw. Throws PeerLost at the deadline; the call goes on.
  void wait(Deadline deadline) const;
  void wait() const;  // the call's own timeout ends it

  int source() const;  // of a receive that is done: who sent it

 private:
  friend class Group;
  explicit Work(std::shared_ptr<WorkState> state) : state_(std::move(state)) {}
  std::shared_ptr<WorkState> state_;
};

class Group {
 public:
  Group(Group&&) noexcept;
  Group& operator=(Group&&) noexcept;

  // Without leave() first, this rank counts as failed: the machine is poisoned, so that no peer waits for it.
  // Calls under way are given up.
  ~Group();

  // This rank is done, in good order. Waits for the calls that were started here, not for the other ranks. Of a
  // sub-group, the destructor is enough.
  void leave();

  int rank() const;
  int size() const;
  int job_rank(int rank) const;                         // what the job calls a rank of this group, as do all messages
  void set_timeout(std::chrono::milliseconds timeout);  // for every wait from now on

  // Memory that peers read in place. It may outlive the group. Throws SystemError.
  Memory allocate(std::size_t bytes);

  // Where a peer's Memory of `bytes` bytes at its offset() is for this rank. What may be read there, and when, is up to
  // the callers: wait with barrier(). Throws SystemError: not mappable.
  std::byte* peer_memory(int rank, std::uint64_t offset, std::size_t bytes);

  void barrier() { run(Barrier{}); }
  void all_reduce(const AllReduce& call) { run(call); }
  void reduce(const Reduce& call) { run(call); }
  void reduce_scatter(const ReduceScatter& call) { run(call); }
  void all_gather(const AllGather& call) { run(call); }
  void broadcast(const Broadcast& call) { run(call); }
  void gather(const Gather& call) { run(call); }
  void scatter(const Scatter& call) { run(call); }
  void all_to_all(const AllToAll& call) { run(call); }
  void send(const Send& call);
  int receive(const Receive& call);  // returns who sent it

  // `timeout`: for the waits of this collective, in place of the group's.
  void run(const Call& call, std::optional<std::chrono::milliseconds> timeout = std::nullopt);

  // As run(), but what the ranks compare, and read in messages, is `announced`: the larger call that this collective is
  // a part of.
  void run_as(const Intent& announced, const Call& call);

  // As run() without blocking: a worker thread of this group makes the calls in the order in which they were started.
  // Sends and receives don't wait for collectives or for each other. Memory must stay until the Work is done.
  [[nodiscard]] Work start(Call call, std::optional<std::chrono::milliseconds> timeout = std::nullopt);

  // A group of some ranks of this one; `ranks` in the order of their new numbers. Every rank of this group calls it;
  // one that is not in its own list gets none. Lists of different ranks are either equal or disjoint, so one call makes
  // one new group, or splits all ranks. Usable at the same time as this group, from another thread.
  std::optional<Group> subgroup(const std::vector<int>& ranks);

  // What every rank of the machine sees as the reason for its PeerLost. No group of the machine can be used afterwards.
  void poison(const std::string& reason);

  std::string describe_ranks() const;  // a line per rank: what it is doing

 private:
  friend struct GroupFactory;
  struct Parts;
  explicit Group(std::unique_ptr<Parts> parts);
  std::unique_ptr<Parts> parts_;
};

}  // namespace lockstep::shm
