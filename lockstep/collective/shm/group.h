// SPDX-License-Identifier: Apache-2.0
// collective/shm/group.h: the ranks of one machine exchange memory: the collectives, in shared memory, without torch.
//
// Flow:    rendezvous_server.h gives a Group of all ranks of the machine -> collectives -> subgroup() for some of them
// Owns:    this rank's side of the group, a thread for messages once one was started without blocking, its share of the
//          machine's mappings. Pointers in calls stay the caller's
// Threads: one thread at a time makes collectives, another may make messages meanwhile; different Groups at the same
//          time. allocate(), poison() and cancel() from any thread
// Ranks:   every rank of the group makes the same calls in the same order, except send and receive
//
// Notation: p ranks, K bytes of data per rank. A call (call.h) blocks until its result is there and nobody reads its
// memory any more. What a call costs:
//
//   data lies in                 all_reduce                                             waits
//   slots (small)                every rank reads p*K, writes K                         1
//   arenas, or ranks as threads  every rank reads K (K/p of each), writes K             2
//   any other memory             the same, plus K written to and 2*K*(p-1)/p read from
//                                staging memory                                         1 per chunk
//
// Peers read memory from allocate() in place. All other memory is staged in chunks, unless ranks are threads.
//
// Throws, from every call: MismatchError on all ranks if they want different things (the group stays usable);
// PeerLost if a rank died, left, failed or did not come before the timeout (no group of the machine is usable any more,
// and every rank finds out within 100 ms); UsageError for arguments that make no sense; SystemError if the machine
// refuses memory.
//
// In a forked child every call throws UsageError, and leave(), cancel(), poison() and the destructor do nothing: the
// group is its parent's.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/base/own_process.h"
#include "lockstep/collective/call.h"
#include "lockstep/collective/future.h"
#include "lockstep/collective/shm/memory/arena.h"
#include "lockstep/collective_types.h"
#include "lockstep/deadline.h"

namespace lockstep::shm {

class Machine;
struct Place;

class Group {
 public:
  // Of all ranks of `machine`, which have taken their seats.
  Group(std::shared_ptr<Machine> machine, int rank, std::chrono::milliseconds timeout);
  Group(Group&&) noexcept;
  Group& operator=(Group&&) noexcept;

  // Without leave() first, this rank counts as failed: the machine is poisoned, so that no peer waits for it. Messages
  // under way are given up; no collective may be.
  ~Group();

  // This rank is done, in good order. Waits for the messages that were started here, not for the other ranks. Of a
  // sub-group, the destructor is enough.
  void leave();

  // As the destructor without leave(): a call under way on another thread ends with PeerLost.
  void cancel();

  int rank() const;
  int size() const;
  int job_rank(int rank) const;                         // what the job calls a rank of this group, as do all messages
  void set_timeout(std::chrono::milliseconds timeout);  // for every wait from now on

  // Memory that peers read in place. It may outlive the group. Throws SystemError.
  Memory allocate(std::size_t bytes);

  int memory_file() const;  // in which allocate() takes memory

  // Where a peer's Memory of `bytes` bytes at its offset() is for this rank. What may be read there, and when, is up to
  // the callers: wait with barrier(). Throws SystemError: not mappable.
  std::byte* peer_memory(int rank, std::uint64_t offset, std::size_t bytes);

  // The other way round: in the arena of which rank of the machine `bytes` bytes at `address` lie, and where there.
  Place locate(const void* address, std::size_t bytes) const;

  void barrier() { run({.operation = Operation::kBarrier}); }
  void all_reduce(Call call) { run_as_operation(Operation::kAllReduce, call); }
  void reduce(Call call) { run_as_operation(Operation::kReduce, call); }
  void reduce_scatter(Call call) { run_as_operation(Operation::kReduceScatter, call); }
  void all_gather(Call call) { run_as_operation(Operation::kAllGather, call); }
  void broadcast(Call call) { run_as_operation(Operation::kBroadcast, call); }
  void gather(Call call) { run_as_operation(Operation::kGather, call); }
  void scatter(Call call) { run_as_operation(Operation::kScatter, call); }
  void all_to_all(Call call) { run_as_operation(Operation::kAllToAll, call); }
  void send(Call call) { run_as_operation(Operation::kSend, call); }
  int receive(Call call) { return run_as_operation(Operation::kReceive, call); }

  // Blocks until the call is done. Returns who sent it, of a receive.
  //
  // Messages of one sender with one tag are received in the order in which they were sent. A send returns at once if
  // the data fits the header (832 bytes) and one of four is free, else once it was received.
  int run(const Call& call);

  // As run(), but what the ranks compare, and print in messages, is `announced`: the signature of the larger call that
  // this collective is a part of.
  void run_as(const Signature& announced, const Call& call);

  // Starts a send or receive. Neither waits for collectives or for other messages. Its memory must stay until it is
  // done.
  [[nodiscard]] FuturePtr start(const Call& message);

  // A group of some ranks of this one; `ranks` in the order of their new numbers. Every rank of this group calls it;
  // one that is not in its own list gets none. Lists of different ranks are either equal or disjoint, so one call makes
  // one new group, or splits all ranks. Usable at the same time as this group, from another thread.
  std::optional<Group> subgroup(const std::vector<int>& ranks);

  void require_own_process() const;  // throws UsageError: this is a forked child

  // What every rank of the machine sees as the reason for its PeerLost. No group of the machine can be used afterwards.
  void poison(const std::string& reason);

  void throw_if_lost() const;  // throws PeerLost where a rank of the machine has died or the machine is poisoned

 private:
  struct Parts;
  explicit Group(std::unique_ptr<Parts> parts);
  bool is_parents() const { return !parts_.get_deleter().process.is_here(); }
  int run_as_operation(Operation operation, Call& call) {
    call.operation = operation;
    return run(call);
  }

  OwnedHere<Parts> parts_;
};

}  // namespace lockstep::shm
