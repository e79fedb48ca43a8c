// SPDX-License-Identifier: Apache-2.0
// collective/shm/reduce_task.h: a reduction, whichever way its data travels: the call, and who reduces what.
//
// Threads: the group's rules
// Ranks:   equal on all but for the memory
#pragma once

#include "lockstep/collective/shm/group_state.h"
#include "lockstep/collective/shm/partition.h"

namespace lockstep::shm {

// Of all_reduce, reduce or reduce_scatter. The call must outlive it.
struct ReduceTask {
  GroupState& group;
  const Call& call;
  Partition partition;                        // rank r reduces part r
  std::size_t element = size_of(call.dtype);  // bytes

  // Where element `begin` lies.
  const std::byte* input(std::size_t begin = 0) const {
    return static_cast<const std::byte*>(call.input) + begin * element;
  }
  std::byte* output(std::size_t begin = 0) const { return static_cast<std::byte*>(call.output) + begin * element; }
  std::size_t bytes() const { return partition.total() * element; }

  bool scatters() const { return call.operation == Operation::kReduceScatter; }  // each rank wants its own part only
  bool wants_all(int rank) const {
    return call.operation == Operation::kAllReduce || (call.operation == Operation::kReduce && call.root == rank);
  }
  bool wants_all() const { return wants_all(group.rank()); }

  // Reduces `count` elements of group.sources into the first `outputs` of group.destinations, of which the first
  // `streamed` are stored past the caches (copy.h).
  void reduce(std::size_t count, std::size_t outputs, std::size_t streamed = 0) const;
};

// Through memory that all ranks can reach, because some rank's is out of its peers' reach (all_reduce_staged.cc). All
// ranks call, once they arrived.
void reduce_staged(const ReduceTask& task);

}  // namespace lockstep::shm
