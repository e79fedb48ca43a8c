// SPDX-License-Identifier: Apache-2.0
// all_reduce as other systems do it, for comparison: central, ring and tree. The default one is in all_reduce.cc.
//
// All three work in place on one array of K bytes per rank that all ranks can reach: the output where it lies in an
// arena or ranks are threads, else a copy in the arena. A rank's flag says which steps it has finished.
//
//   central  rank 0 reads all p arrays and writes its own (p+1 times K past one core); then p-1 ranks copy K each
//   ring     2(p-1) steps of K/p: in step k rank r takes one part from its left neighbour, first adding, then copying
//   tree     2 log2(p) steps of K: partners at distance 1, 2, 4, ... are added pairwise up to rank 0, then copied down
//
// ring and tree round float16 and bfloat16 after every step.
#include <array>
#include <bit>

#include "lockstep/collective/shm/collectives.h"
#include "lockstep/collective/shm/partition.h"
#include "lockstep/collective/shm/reduce_kernels.h"

namespace lockstep::shm {
namespace {

// The arrays of all ranks, filled with their inputs and announced.
class SharedArrays {
 public:
  SharedArrays(Group& group, const Call& call)
      : group_(group), call_(call), bytes_(call.count * size_of(call.dtype)) {
    mine_ = static_cast<std::byte*>(call.output);
    if (group_.locate(mine_, bytes_).kind == Location::Kind::kPrivate) {
      copy_ = group_.allocate(bytes_);
      mine_ = copy_.data();
    }
    copy_bytes(mine_, static_cast<const std::byte*>(call.input), bytes_);
    const Location place = group_.locate(mine_, bytes_);
    group_.announce(place, place);
    group_.arrive();
  }

  std::size_t bytes() const { return bytes_; }
  std::byte* of(int rank) const { return group_.pointer(group_.announcement(rank).output(), bytes_); }

  // target = the reduction of `inputs`, for one part; `last` if nothing is to be added any more.
  void reduce_part(std::span<const std::byte* const> inputs, std::byte* target, std::size_t count, bool last) const {
    const bool divide_later = call_.op == ReduceOp::kMean && !last;
    const std::array targets{target};
    reduce({.sources = inputs, .destinations = targets, .count = count, .divisor = group_.size()}, call_.dtype,
           divide_later ? ReduceOp::kSum : call_.op);
  }

  // After step `steps - 1`: nobody returns before all are done with its array.
  void finish(std::uint32_t steps) {
    group_.finish(steps);
    copy_bytes(static_cast<std::byte*>(call_.output), mine_, bytes_);
  }

 private:
  Group& group_;
  const Call& call_;
  std::size_t bytes_;
  std::byte* mine_ = nullptr;
  Memory copy_;
};

void reduce_everything(Group& group, const SharedArrays& arrays, std::size_t count) {
  const Group::PeerAccess access(group);
  for (int peer = 0; peer < group.size(); ++peer) group.sources[peer] = arrays.of(peer);
  arrays.reduce_part(group.sources, arrays.of(0), count, true);
}

void copy_array(Group& group, const SharedArrays& arrays, int from) {
  const Group::PeerAccess access(group);
  copy_bytes(arrays.of(group.rank()), arrays.of(from), arrays.bytes());
}

// Adds (or copies) the left neighbour's part to the own one.
void take_from_left(Group& group, const SharedArrays& arrays, Part part, DType dtype, bool add, bool last) {
  const Group::PeerAccess access(group);
  const int left = (group.rank() + group.size() - 1) % group.size();
  const std::size_t offset = part.begin * size_of(dtype);
  std::byte* const own = arrays.of(group.rank()) + offset;
  const std::byte* const theirs = arrays.of(left) + offset;
  if (add)
    arrays.reduce_part(std::array<const std::byte*, 2>{theirs, own}, own, part.count, last);
  else
    copy_bytes(own, theirs, part.count * size_of(dtype));
}

void add_child(Group& group, const SharedArrays& arrays, int child, std::size_t count, bool last) {
  const Group::PeerAccess access(group);
  std::byte* const own = arrays.of(group.rank());
  arrays.reduce_part(std::array<const std::byte*, 2>{own, arrays.of(child)}, own, count, last);
}

// Two steps: rank 0 reduces all arrays into its own, the others copy that.
void all_reduce_central(Group& group, const Call& call) {
  SharedArrays arrays(group, call);
  if (group.rank() == 0) {
    reduce_everything(group, arrays, call.count);
    group.post(1);
  } else {
    group.wait(1, 0);
    copy_array(group, arrays, 0);
  }
  arrays.finish(2);
}

// Steps 1 ... p-1 add, steps p ... 2p-2 copy; each moves K/p per rank. Part s starts at rank s, collects a summand at
// each rank on its way, is complete at rank s-1 and goes round once more.
//
// In step k rank r takes part r-k (mod p) from its left neighbour, once that one has finished step k-1. It overwrites a
// part only after its right neighbour has read it: before step p+j its left neighbour has finished p+j-1, so the one
// before that p+j-2, and so on around; the right neighbour, p-1 places on, has finished j+1, in which it read part r-j.
void all_reduce_ring(Group& group, const Call& call) {
  SharedArrays arrays(group, call);
  const int p = group.size();
  const Partition split = Partition::even(call.count, p, kCacheLine / size_of(call.dtype));
  const int left = (group.rank() + p - 1) % p;
  for (int step = 1; step <= 2 * p - 2; ++step) {
    if (step > 1) group.wait(static_cast<unsigned>(step - 1), left);
    const bool add = step < p;
    const int part = (group.rank() - step + 2 * p) % p;
    take_from_left(group, arrays, split[part], call.dtype, add, step == p - 1);
    group.post(static_cast<unsigned>(step));
  }
  arrays.finish(static_cast<unsigned>(2 * p - 1));
}

// A binomial tree. Up, level by level: a rank whose number has the lowest `level` bits 0 adds the array of the rank
// `distance` above it, K bytes, once that one has finished the level before. Down: the same pairs in reverse order, the
// upper rank copies K bytes. An upper rank's array is read up before it is overwritten down, levels apart.
void all_reduce_tree(Group& group, const Call& call) {
  SharedArrays arrays(group, call);
  const int rank = group.rank();
  const int levels = std::bit_width(static_cast<unsigned>(group.size() - 1));
  std::uint32_t step = 0;
  for (int level = 0; level < levels; ++level) {
    const int distance = 1 << level;
    if (rank % (2 * distance) == 0 && rank + distance < group.size()) {
      group.wait(step, rank + distance);
      add_child(group, arrays, rank + distance, call.count, level == levels - 1);
    }
    group.post(++step);
  }
  for (int level = levels - 1; level >= 0; --level) {
    const int distance = 1 << level;
    if (rank % (2 * distance) == distance) {
      group.wait(step, rank - distance);
      copy_array(group, arrays, rank - distance);
    }
    group.post(++step);
  }
  arrays.finish(step + 1);
}

}  // namespace

void all_reduce_reference(Group& group, const Call& call) {
  if (call.algorithm == Algorithm::kRing) return all_reduce_ring(group, call);
  if (call.algorithm == Algorithm::kTree) return all_reduce_tree(group, call);
  all_reduce_central(group, call);
}

}  // namespace lockstep::shm
