// SPDX-License-Identifier: Apache-2.0
// collective/shm/reduce_task.h: a reduction, whichever way its data travels: the call, and who reduces what.
//
// Threads: values
// Ranks:   equal on all but for the memory
#pragma once

#include "lockstep/collective/call.h"
#include "lockstep/collective/shm/group_state.h"
#include "lockstep/collective/shm/partition.h"

namespace lockstep::shm {

// Of all_reduce, reduce or reduce_scatter. The call must outlive it.
struct ReduceTask {
  const Call& call;
  Partition partition;  // rank r reduces part r

  const std::byte* input() const { return static_cast<const std::byte*>(call.input); }
  std::byte* output() const { return static_cast<std::byte*>(call.output); }
  std::size_t element() const { return size_of(call.dtype); }
  std::size_t bytes() const { return partition.total() * element(); }

  bool scatters() const { return call.operation == Operation::kReduceScatter; }  // each rank wants its own part only
  bool wants_all(int rank) const {
    return call.operation == Operation::kAllReduce || (call.operation == Operation::kReduce && call.root == rank);
  }

  // Reduces `count` elements of group.sources into the first `outputs` of group.destinations, of which the first
  // `streamed` are stored past the caches (copy.h).
  void reduce(GroupState& group, std::size_t count, std::size_t outputs, std::size_t streamed = 0) const;
};

}  // namespace lockstep::shm
