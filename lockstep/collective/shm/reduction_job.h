// collective/shm/reduction_job.h: what a reduction has to do, whichever way its data travels.
//
// Threads: values
// Ranks:   equal on all but for the memory
#pragma once

#include "lockstep/collective/shm/group_state.h"
#include "lockstep/collective/shm/split.h"
#include "lockstep/collective_types.h"

namespace lockstep::shm {

enum class Wanted { kByAll, kByRoot, kByOwner };  // whose output receives the result of a part

struct ReductionJob {
  const std::byte* input;
  std::byte* output;  // everything, or for kByOwner the own part
  DType dtype;
  ReduceOp op;
  Split split;  // part r is rank r's to reduce
  Wanted wanted;
  int root = -1;

  bool everything_wanted_by(int rank) const {
    return wanted == Wanted::kByAll || (wanted == Wanted::kByRoot && root == rank);
  }
  std::size_t bytes() const { return split.total() * size_of(dtype); }
};

// Reduces `count` elements of group.sources into the first `outputs` of group.destinations.
void reduce_sources(GroupState& group, const ReductionJob& job, std::size_t count, std::size_t outputs,
                    std::size_t streamed = 0);

}  // namespace lockstep::shm
