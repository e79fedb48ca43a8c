// SPDX-License-Identifier: Apache-2.0
// all_reduce as other systems do it, for comparison: central, ring and tree. The default one is in all_reduce.cc.
//
// All three work in place on one array of K bytes per rank that all ranks can reach: the output where it lies in an
// arena or ranks are threads, else a copy in the arena. A rank's flag says which steps it has finished.
//
// docs/collectives.md#all_reduce-four-ways has their steps and bytes.

#include "lockstep/collective/shm/group.h"
#include "lockstep/collective/shm/partition.h"
#include "lockstep/collective/shm/reduce_kernels.h"

namespace lockstep::shm {
namespace {

// The arrays of all ranks, filled with their inputs and announced, and what is done with this rank's.
class SharedArrays {
 public:
  SharedArrays(Group& group, const Call& call)
      : group_(group), call_(call), whole_{0, call.count}, element_(size_of(call.dtype)) {
    const size_t bytes = call.count * element_;
    mine_ = static_cast<std::byte*>(call.output);
    if (group.locate(mine_, bytes).kind == Location::kPrivate) {
      copy_ = group.allocate(bytes);
      mine_ = copy_.data();
    }
    copy_bytes(mine_, static_cast<const std::byte*>(call.input), bytes);
    const Location place = group.locate(mine_, bytes);
    group.announce(place, place);
    group.arrive();
  }

  // Two steps: rank 0 reduces all arrays into its own, the others copy that.
  void central() {
    if (group_.rank() == 0) {
      const Group::PeerAccess access(group_);
      for (int peer = 0; peer < group_.size(); ++peer) group_.sources[peer] = of(peer, whole_);
      reduce_sources(group_.size(), whole_, true);
      group_.post(1);
    } else {
      group_.wait(1, 0);
      copy(0, whole_);
    }
    finish(2);
  }

  // Steps 1 ... p-1 add, steps p ... 2p-2 copy; each moves K/p per rank. Part s starts at rank s, collects a summand at
  // each rank on its way, is complete at rank s-1 and goes round once more.
  //
  // In step k rank r takes part r-k (mod p) from its left neighbour, once that one has finished step k-1. It overwrites a
  // part only after its right neighbour has read it: before step p+j its left neighbour has finished p+j-1, so the one
  // before that p+j-2, and so on around; the right neighbour, p-1 places on, has finished j+1, in which it read part r-j.
  void ring() {
    const int p = group_.size();
    const Partition split = Partition::even(whole_.count, p, kCacheLine / element_);
    const int left = (group_.rank() + p - 1) % p;
    for (int step = 1; step <= 2 * p - 2; ++step) {
      if (step > 1) group_.wait(static_cast<unsigned>(step - 1), left);
      const Part part = split[(group_.rank() - step + 2 * p) % p];
      if (step < p)
        reduce({left, group_.rank()}, part, step == p - 1);
      else
        copy(left, part);
      group_.post(static_cast<unsigned>(step));
    }
    finish(static_cast<unsigned>(2 * p - 1));
  }

  // A binomial tree. Up, level by level: a rank whose number has the lowest `level` bits 0 adds the array of the rank
  // `distance` above it, K bytes, once that one has finished the level before. Down: the same pairs in reverse order, the
  // upper rank copies K bytes. An upper rank's array is read up before it is overwritten down, levels apart.
  void tree() {
    const int rank = group_.rank();
    const int levels = std::bit_width(static_cast<unsigned>(group_.size() - 1));
    uint32_t step = 0;
    for (int level = 0; level < levels; ++level) {
      const int distance = 1 << level;
      if (rank % (2 * distance) == 0 && rank + distance < group_.size()) {
        group_.wait(step, rank + distance);
        reduce({rank, rank + distance}, whole_, level == levels - 1);
      }
      group_.post(++step);
    }
    for (int level = levels - 1; level >= 0; --level) {
      const int distance = 1 << level;
      if (rank % (2 * distance) == distance) {
        group_.wait(step, rank - distance);
        copy(rank - distance, whole_);
      }
      group_.post(++step);
    }
    finish(step + 1);
  }

 private:
  std::byte* of(int rank, Part part) const {
    return group_.pointer(group_.announcement(rank).output(), whole_.count * element_) + part.begin * element_;
  }

  void copy(int from, Part part) const {
    const Group::PeerAccess access(group_);
    copy_bytes(of(group_.rank(), part), of(from, part), part.count * element_);
  }

  // Reduces that part of the arrays of `ranks`, in this order, into this rank's. `last`: nothing is to be added any more.
  void reduce(std::initializer_list<int> ranks, Part part, bool last) const {
    const Group::PeerAccess access(group_);
    int sources = 0;
    for (const int rank : ranks) group_.sources[sources++] = of(rank, part);
    reduce_sources(sources, part, last);
  }
  void reduce_sources(int sources, Part part, bool last) const {
    group_.destinations[0] = of(group_.rank(), part);
    shm::reduce({.sources = std::span(group_.sources).first(to_size(sources)),
                 .destinations = std::span(group_.destinations).first(1),
                 .count = part.count,
                 .divisor = group_.size()},
                call_.dtype, call_.op == ReduceOp::kMean && !last ? ReduceOp::kSum : call_.op);
  }

  // After step `steps - 1`: no rank returns before all are done with its array.
  void finish(uint32_t steps) {
    group_.finish(steps);
    copy_bytes(static_cast<std::byte*>(call_.output), mine_, whole_.count * element_);
  }

  Group& group_;
  const Call& call_;
  Part whole_;
  size_t element_;  // bytes
  std::byte* mine_ = nullptr;
  Memory copy_;
};

}  // namespace

void all_reduce_reference(Group& group, const Call& call) {
  SharedArrays arrays(group, call);
  if (call.algorithm == Algorithm::kRing) return arrays.ring();
  if (call.algorithm == Algorithm::kTree) return arrays.tree();
  arrays.central();
}

}  // namespace lockstep::shm
