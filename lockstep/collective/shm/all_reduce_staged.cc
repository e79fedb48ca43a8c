// SPDX-License-Identifier: Apache-2.0
#include "lockstep/collective/shm/all_reduce_staged.h"

#include <algorithm>

#include "lockstep/collective/shm/copy.h"
#include "lockstep/collective/shm/thresholds.h"

namespace lockstep::shm {
namespace {

std::size_t chunks_of(std::size_t bytes, std::size_t chunk) { return (bytes + chunk - 1) / chunk; }

// Chunk number `chunk` of `part`, where each chunk carries `per_chunk` of its elements.
Part part_of_chunk(Part part, std::size_t per_chunk, std::size_t chunk) {
  const std::size_t skipped = std::min(part.count, chunk * per_chunk);
  return {part.begin + skipped, std::min(per_chunk, part.count - skipped)};
}

// Every rank stages everything; who wants the result reduces all of it by itself.
class WholeReducer {
 public:
  WholeReducer(GroupState& group, const ReduceTask& task)
      : group_(group), task_(task), element_(task.element()), per_chunk_(group.staging_bytes() / element_) {}

  // Step s stages chunk s, and reduces chunk s-1, which all have staged by then.
  void run() {
    const std::size_t chunks = chunks_of(task_.partition.total(), per_chunk_);
    group_.stream(
        chunks, 1, [&](std::size_t chunk) { stage(chunk); }, [&](std::size_t step) { reduce_chunk(step - 1); });
  }

 private:
  bool wanted_here() const { return task_.wants_all(group_.rank()); }
  Part part_of(std::size_t chunk) const { return part_of_chunk({0, task_.partition.total()}, per_chunk_, chunk); }

  void stage(std::size_t chunk) const {
    if (task_.call.operation == Operation::kReduce && wanted_here()) return;  // no other rank reads the root's input
    const Part part = part_of(chunk);
    show_bytes(group_.staging(group_.rank(), chunk), task_.input() + part.begin * element_, part.count * element_);
  }

  void reduce_chunk(std::size_t chunk) {
    if (!wanted_here()) return;
    const Part part = part_of(chunk);
    for (int peer = 0; peer < group_.size(); ++peer)
      group_.sources[peer] =
          peer == group_.rank() ? task_.input() + part.begin * element_ : group_.staging(peer, chunk);
    group_.destinations[0] = task_.output() + part.begin * element_;
    task_.reduce(group_, part.count, 1);
  }

  GroupState& group_;
  const ReduceTask& task_;
  std::size_t element_;
  std::size_t per_chunk_;
};

// Rank r reduces part r, whose chunks travel in lane r of every rank's staging memory.
class LaneReducer {
 public:
  LaneReducer(GroupState& group, const ReduceTask& task)
      : group_(group),
        task_(task),
        element_(task.element()),
        lane_(group.staging_bytes() / static_cast<unsigned>(group.size()) / kCacheLine * kCacheLine),
        chunks_(chunks_of(task.partition.longest() * element_, lane_)) {}

  // Step s: stages chunk s for the others; reduces the own lane of chunk s-1, which all have staged; copies the results
  // of chunk s-2, which all have reduced. A reduce_scatter is done after the second of these.
  void run() {
    group_.stream(
        chunks_, task_.scatters() ? 1 : 2, [&](std::size_t chunk) { stage(chunk); },
        [&](std::size_t step) {
          if (step <= chunks_) reduce_lane(step - 1);
          if (step > 1 && task_.wants_all(group_.rank())) copy_out(step - 2);
        });
  }

 private:
  Part part_of(int rank, std::size_t chunk) const {
    return part_of_chunk(task_.partition[rank], lane_ / element_, chunk);
  }
  std::byte* lane_of(int staged_by, int owner, std::size_t chunk) const {
    return group_.staging(staged_by, chunk) + static_cast<unsigned>(owner) * lane_;
  }

  void stage(std::size_t chunk) const;
  void reduce_lane(std::size_t chunk);
  void copy_out(std::size_t chunk) const;

  GroupState& group_;
  const ReduceTask& task_;
  std::size_t element_;
  std::size_t lane_;  // bytes
  std::size_t chunks_;
};

void LaneReducer::stage(std::size_t chunk) const {
  for (int owner = 0; owner < group_.size(); ++owner) {
    if (owner == group_.rank()) continue;
    const Part part = part_of(owner, chunk);
    show_bytes(lane_of(group_.rank(), owner, chunk), task_.input() + part.begin * element_, part.count * element_);
  }
}

// The result goes into this rank's own lane, which stage() leaves free, for the others to copy.
void LaneReducer::reduce_lane(std::size_t chunk) {
  const int me = group_.rank();
  const Part part = part_of(me, chunk);
  if (part.count == 0) return;
  for (int peer = 0; peer < group_.size(); ++peer)
    group_.sources[peer] = peer == me ? task_.input() + part.begin * element_ : lane_of(peer, me, chunk);
  if (task_.scatters()) {
    group_.destinations[0] = task_.output() + (part.begin - task_.partition[me].begin) * element_;
    return task_.reduce(group_, part.count, 1);
  }
  group_.destinations[0] = lane_of(me, me, chunk);
  const bool wanted = task_.wants_all(me);
  if (wanted) group_.destinations[1] = task_.output() + part.begin * element_;
  task_.reduce(group_, part.count, wanted ? 2 : 1, part.count * element_ < kStreamFromBytes ? 0 : 1);
}

void LaneReducer::copy_out(std::size_t chunk) const {
  for (int owner = 0; owner < group_.size(); ++owner) {
    if (owner == group_.rank()) continue;
    const Part part = part_of(owner, chunk);
    copy_bytes(task_.output() + part.begin * element_, lane_of(owner, owner, chunk), part.count * element_);
  }
}

}  // namespace

void reduce_staged(GroupState& group, const ReduceTask& task) {
  group.make_staging();
  if (group.size() <= kReduceAllRanks && !task.scatters()) return WholeReducer(group, task).run();
  LaneReducer(group, task).run();
}

}  // namespace lockstep::shm
