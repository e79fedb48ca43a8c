// SPDX-License-Identifier: Apache-2.0
// collective/shm/group_state.h: one rank's side of one group: how it enters a collective with the others, and the steps
// they take together. The collectives (collectives.h) are written in these verbs.
//
//   begin(signature)     collective number s of the group begins; slot and counts of s may be written
//   arrive(in, out)      announces signature and places in one cache line, waits for all others, compares signatures
//   post(k), wait_all(k) step k of this collective: raise the own flag, wait for the flags of the others
//   end(k)               k steps were used; all ranks say the same number
//
// arrive() returns only after all ranks have left collective s-1: a rank arrives at s only when it is done with s-1. So
// everything that s-1 used may be used again, and a collective whose data fits the slots needs no second wait.
//
// Owns:    numbers of the collective and step; the staging memory; scratch lists of p entries
// Threads: one at a time
// Ranks:   every rank of the group makes the same calls in the same order
#pragma once

#include <array>
#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/base/int_vector.h"
#include "lockstep/collective/call.h"
#include "lockstep/collective/shm/connect/machine.h"
#include "lockstep/collective/shm/memory/control_block.h"
#include "lockstep/collective/shm/waiting.h"

namespace lockstep::shm {

class GroupState final : public Narrator {
 public:
  // `ranks`: the machine's ranks of this group's ranks 0, 1, ...
  GroupState(std::shared_ptr<Machine> machine, GroupArea area, std::vector<int> ranks, int rank,
             std::chrono::milliseconds timeout);

  int rank() const { return rank_; }
  int size() const { return ranks_.size(); }
  int machine_rank(int rank) const { return ranks_[rank]; }
  int job_rank(int rank) const { return machine_->job_rank(machine_rank(rank)); }
  std::string name(int rank) const { return machine_->name(machine_rank(rank)); }  // "rank 3"
  Machine& machine() const { return *machine_; }
  const std::shared_ptr<Machine>& shared_machine() const { return machine_; }
  const GroupArea& area() const { return area_; }
  Waiter& waiter() { return waiter_; }

  // Runs a collective. `timeout`: of its waits; 0: the group's. Whatever it throws except MismatchError (which all ranks
  // throw alike, before any data moved) leaves the machine poisoned and no peer using this rank's memory.
  template <class Body>
  void run(std::chrono::milliseconds timeout, const Body& body) {
    waiter_.begin_call(timeout);
    try {
      body();
    } catch (...) {
      after_failure();
      throw;
    }
  }

  void begin(const Signature& signature);
  const std::optional<Signature>& announced_as() const { return announced_as_; }
  void announce_as(const Signature& other) { announced_as_ = other; }  // in place of what the next begin() is given
  void arrive(Place input, Place output, std::size_t longest_message = 0);
  void arrive_with(const std::byte* data, std::size_t bytes);  // at most Announcement::kLineBytes

  void post(std::uint32_t step) { area_.progress(rank_).phase.raise(phase_ + step); }
  void wait_for(int peer, std::uint32_t step);
  void wait_all(std::uint32_t step);
  void end(std::uint32_t steps) { phase_ += steps; }
  void finish(std::uint32_t steps) {  // once all ranks have posted the last one
    post(steps);
    wait_all(steps);
    end(steps);
  }

  const Announcement& announcement(int peer) const { return area_.announcement(peer, sequence_); }
  std::byte* slot(int peer) const { return area_.slot(peer, sequence_); }
  std::uint64_t* counts(int peer) const { return area_.counts(peer, sequence_); }

  Memory allocate(std::size_t bytes) const { return machine_->arena(machine_rank(rank_))->allocate(bytes); }
  Place locate(const void* address, std::size_t bytes) const { return machine_->locate(address, bytes); }
  std::byte* pointer(Place place, std::size_t bytes) const { return machine_->pointer(place, bytes); }

  // Staging memory, kStagingChunks chunks of staging_bytes() in turn. The own memory is made at first use and announced
  // by the next post().
  std::size_t staging_bytes() const { return machine_->staging_bytes(); }
  std::size_t lane_bytes(int lanes) const {
    return staging_bytes() / static_cast<unsigned>(lanes) / kCacheLine * kCacheLine;
  }
  void make_staging();
  std::byte* staging(int rank, std::size_t chunk) const;

  // Passes data through staging memory, chunk by chunk, with one wait per chunk. In step s this rank
  //
  //   1  stage(s)     fills its chunk s, in place s % kStagingChunks, while others may still be in step s-1
  //   2  wait_all(s)  until all others have posted s, which means that they have staged chunk s-1
  //   3  use(s)       reads chunk s-1 of the others
  //   4  post(s+1)    says that it has staged chunk s, and has read all chunks below s
  //
  // `more` steps follow the last chunk. With kStagingChunks = 4 chunk s overwrites chunk s-4. Its last reader, in step
  // s-2 if use() looks two chunks back, posted s-1 after that; this rank waited for s-1 in step s-1. So nobody reads it.
  // Returns once nobody reads this rank's staging memory any more.
  template <class Stage, class Use>
  void stream(std::size_t chunks, std::size_t more, const Stage& stage, const Use& use) {
    std::uint32_t step = 0;
    for (; step < chunks + more; ++step) {
      if (step < chunks) stage(step);
      if (step > 0) {
        wait_all(step);
        use(step);
      }
      post(step + 1);
    }
    wait_all(step);
    end(step);
  }

  // Inside a catch block: what `run` does there.
  void after_failure() const;

  // Names rank and call on both sides of a disagreement. Throws MismatchError.
  [[noreturn]] void disagree(int peer, const std::string& mine, const std::string& theirs) const;

  // Guards a read or write of memory that belongs to a peer which is a thread of this process. While it lives, a peer
  // that fails does not return from its call, so that it can't free that memory. Throws PeerLost instead of starting
  // once the machine is poisoned.
  class PeerAccess {
   public:
    explicit PeerAccess(const GroupState& group);
    ~PeerAccess();
    PeerAccess(const PeerAccess&) = delete;
    PeerAccess& operator=(const PeerAccess&) = delete;

   private:
    const GroupState& group_;
  };

  std::string self() const;  // "rank 1 of 2", and what the job calls it where that differs
  std::string here() const override;
  std::string everyone() const override;

  // Scratch, one entry per rank.
  IntVector<const std::byte*> sources;
  IntVector<std::byte*> destinations;
  IntVector<std::array<std::byte, Announcement::kLineBytes>> lines;

 private:
  friend struct CountersOf;  // a test, which begins near the wrap

  void wait_for_arrivals();
  void compare_signatures() const;
  const Announcement& last_of(int rank) const;
  std::string doing(int rank) const;

  std::shared_ptr<Machine> machine_;
  GroupArea area_;
  IntVector<int> ranks_;  // of the machine
  int rank_;
  Waiter waiter_;
  std::uint32_t sequence_ = 0;  // of the collective under way, or of the last one
  std::uint32_t phase_ = 0;     // steps used by all collectives before this one
  Signature signature_;         // of that collective
  std::optional<Signature> announced_as_;
  Memory staging_;
};

}  // namespace lockstep::shm
