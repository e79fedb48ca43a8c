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
// A call (call.h) blocks until its result is there and nobody reads its memory any more. Peers read memory from allocate()
// in place. All other memory is staged in chunks, unless ranks are threads. docs/collectives.md has what a call costs.
//
// Throws, from every call: MismatchError on all ranks if they want different things (the group stays usable);
// PeerLost if a rank died, left, failed or did not come before the timeout (no group of the machine is usable any more,
// and every rank finds out within 100 ms); UsageError for arguments that make no sense; SystemError if the machine
// refuses memory.
//
// In a forked child every call throws UsageError, and leave(), cancel(), poison() and the destructor do nothing: the
// group is its parent's.
#pragma once

#include "lockstep/base/process/own_process.h"
#include "lockstep/collective/calls/future.h"
#include "lockstep/collective/shm/waiting.h"

namespace lockstep::shm {

class Group;
class Mailbox;
using GroupPtr = std::shared_ptr<Group>;

class Group final : public CallDescription {
 public:
  // All ranks of the machine, which have taken their seats.
  static GroupPtr of_all(const std::shared_ptr<Peers>& peers, int rank, milliseconds timeout);

  // Without leave() first, this rank counts as failed: the machine is poisoned, so that no peer waits for it. Messages
  // under way are given up; no collective may be.
  ~Group();
  Group& operator=(Group&&) = delete;

  // This rank is done, in good order. Waits for the messages that were started here, not for the other ranks. A
  // sub-group's destructor is enough.
  void leave();

  // As the destructor without leave(): a call under way on another thread ends with PeerLost.
  void cancel();

  int rank() const { return rank_; }
  int size() const { return ranks_.size(); }
  int machine_rank(int rank) const { return ranks_[rank]; }
  int job_rank(int rank) const { return peers_->job_rank(ranks_[rank]); }  // the job's number of a rank, as in messages
  void set_timeout(milliseconds timeout);                                  // for every wait from now on

  // Memory that peers read in place. It may outlive the group. Throws SystemError.
  Memory allocate(size_t bytes) const;
  int memory_file() const;  // in which allocate() takes memory

  // The address here of a peer's Memory of `bytes` bytes at its offset(). The callers agree on what may be read there and
  // when: wait with barrier(). Throws SystemError: not mappable.
  std::byte* peer_memory(int rank, uint64_t offset, size_t bytes) const {
    return pointer(in_arena(ranks_[rank], offset), bytes);
  }

  // The other way round: where `bytes` bytes at `address` lie for the peers.
  Location locate(const void* address, size_t bytes) const { return peers_->locate(address, bytes); }

  void barrier() { run({.operation = Operation::kBarrier}); }

  // Blocks until the call is done. Returns the sender of a receive. `announced`: the signature that the ranks compare,
  // and print in messages, where this collective is a part of a larger call.
  //
  // Messages of one sender with one tag are received in the order in which they were sent. A send returns at once if
  // the data fits the header (832 bytes) and one of four is free, else once it was received.
  int run(const Call& call, const Signature* announced = nullptr);

  // Starts a send or receive. Neither waits for collectives or for other messages. Its memory must stay until it is
  // done.
  [[nodiscard]] FuturePtr start(const Call& message);

  // A group of some ranks of this one; `ranks` in the order of their new numbers. Every rank of this group calls it, and
  // one that gives no ranks gets none. The caller has made sure that lists of different ranks are either equal or
  // disjoint, and that each rank is in its own. Usable at the same time as this group, from another thread.
  GroupPtr subgroup(const std::vector<int>& ranks);

  void require_own_process() const;  // throws UsageError: this is a forked child

  // Every rank of the machine sees it as the reason for its PeerLost. No group of the machine can be used afterwards.
  void poison(const std::string& reason) const;

  void throw_if_lost() const;  // throws PeerLost where a rank of the machine has died or the machine is poisoned

  // ---- For the collectives (below), which are written in these verbs:
  //
  //   announce(in, out)    writes signature and locations of collective number s in one cache line
  //   arrive()             shows that line, waits for all others, compares signatures
  //   post(k), wait(k)     step k of this collective: raise the own flag, wait for the flags of the others
  //   finish(k)            the last step, k, is done; all ranks say the same number
  //
  // arrive() returns only after all ranks have left collective s-1: a rank arrives at s only when it is done with s-1.
  // So everything that s-1 used may be used again, and a collective whose data fits the slots needs no second wait.

  void announce(Location input, Location output, size_t longest_message = 0);
  void announce_line(const std::byte* data, size_t bytes);  // at most Announcement::kLineBytes
  void arrive();
  void post(uint32_t step) { area_.progress(rank_).phase.raise(phase_ + step); }
  void wait(uint32_t step, int only = kAnyRank);  // `only`: for that rank alone
  void finish(uint32_t steps);                    // once all ranks have posted the last one
  void end(uint32_t steps) { phase_ += steps; }

  const Announcement& announcement(int peer) const { return area_.announcement(peer, sequence_); }
  std::byte* slot(int peer) const { return area_.slot(peer, sequence_); }
  uint64_t* counts(int peer) const { return area_.counts(peer, sequence_); }
  std::byte* pointer(Location location, size_t bytes) const { return peers_->pointer(location, bytes); }
  std::string name(int rank) const { return peers_->name(ranks_[rank]); }  // "rank 3"
  Peers& peers() const { return *peers_; }
  const GroupArea& area() const { return area_; }

  // Staging memory passes data on, kStagingChunks chunks of staging_bytes() in turn, with one wait per chunk. In step s a
  // rank
  //
  //   1  post(s)  says that it has staged chunk s-1, and has read all chunks below s-1
  //   2           fills its chunk s, in place s % kStagingChunks, while others may still be in step s-1
  //   3  wait(s)  until all others have posted s, which means that they have staged chunk s-1
  //   4           reads chunk s-1 of the others
  //
  // Step 0 only fills. With kStagingChunks = 4 chunk s overwrites chunk s-4. Its last reader, in step s-2 if it looks two
  // chunks back, posted s-1 after that; this rank waited for s-1 in step s-1. So nobody reads it. After finish() nobody
  // reads this rank's staging memory any more.
  size_t staging_bytes() const { return peers_->staging_bytes(); }
  size_t lane_bytes(int lanes) const { return staging_bytes() / to_size(lanes) / kCacheLine * kCacheLine; }
  void make_staging();  // at first use; the next post() announces it
  std::byte* staging(int rank, size_t chunk) const;

  // Inside a catch block: leaves the machine poisoned, unless it is a MismatchError (which all ranks throw alike, before
  // any data moved), and no peer using this rank's memory.
  void after_failure() const;

  // Names rank and call on both sides of a disagreement. Throws MismatchError.
  [[noreturn]] void disagree(int peer, const std::string& mine, const std::string& theirs) const;

  // Guards a read or write of memory that belongs to a peer which is a thread of this process. While it lives, a peer
  // that fails does not return from its call, so that it can't free that memory. Throws PeerLost instead of starting
  // once the machine is poisoned.
  class PeerAccess {
   public:
    explicit PeerAccess(const Group& group);
    ~PeerAccess();
    PeerAccess& operator=(PeerAccess&&) = delete;

   private:
    const Group& group_;
  };

  std::string self() const;  // "rank 1 of 2", and the job's number of it where that differs
  std::string here() const override;
  std::string everyone() const override;

  // Scratch, one entry per rank.
  IntVector<const std::byte*> sources;
  IntVector<std::byte*> destinations;
  IntVector<std::array<std::byte, Announcement::kLineBytes>> lines;

 private:
  friend struct CountersOf;  // a test, which begins near the wrap

  // `ranks`: the machine's ranks of this group's ranks 0, 1, ...
  Group(std::shared_ptr<Peers> peers, GroupArea area, std::vector<int> ranks, int rank, milliseconds timeout);
  bool is_parents() const { return !process_.is_here(); }
  void begin(const Signature& signature);
  const Announcement& last_of(int rank) const;
  std::string doing(int rank) const;

  OwnProcess process_;
  std::shared_ptr<Peers> peers_;
  GroupArea area_;
  IntVector<int> ranks_;  // of the machine
  int rank_;
  Waiter waiter_;
  uint32_t sequence_ = 0;  // of the collective under way, or of the last one
  uint32_t phase_ = 0;     // steps used by all collectives before this one
  Signature signature_;    // of that collective
  Memory staging_;
  bool is_subgroup_ = false;
  Memory area_memory_;  // of a sub-group, at its rank 0
  bool left_ = false;
  std::unique_ptr<Mailbox> mailbox_;  // the last member: its thread uses the others
};

// The collectives, each in the verbs above. all_reduce.cc, all_reduce_reference.cc and exchange.cc say at their beginning
// how each works, and what each rank does for K bytes and p ranks.
void all_reduce(Group& group, const Call& call);            // or reduce, or reduce_scatter
void all_reduce_reference(Group& group, const Call& call);  // by another call.algorithm than kDirect
void broadcast(Group& group, const Call& call);
void gather(Group& group, const Call& call);  // or all_gather; also the one that makes a sub-group
void scatter(Group& group, const Call& call);
void all_to_all(Group& group, const Call& call);

// Zeroed memory of this rank, with a SharedHeader, which is a part of `bytes`, for so many ranks. Throws SystemError.
Memory make_shared_memory(const Group& group, size_t bytes, int users);

}  // namespace lockstep::shm
