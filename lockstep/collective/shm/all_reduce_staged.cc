// SPDX-License-Identifier: Apache-2.0
// Reductions of memory that peers can't reach, chunk by chunk through staging memory. K bytes, p ranks:
//
//   two ranks    each stages all of its input and reduces the other's chunks with its own: K staged, K read
//   more         a chunk has a lane per rank. Each rank stages the parts of the others, reduces its own lane of the
//                chunk before from theirs and its own input, into its staged lane and its own output, and copies
//                the results of the chunk before that out of the others' lanes: K staged, 2K(p-1)/p read
//
// What others read next is stored past the caches (copy.h). One wait per chunk (GroupState::stream).
#include "lockstep/collective/shm/copy.h"
#include "lockstep/collective/shm/reduce_task.h"
#include "lockstep/collective/shm/thresholds.h"

namespace lockstep::shm {
namespace {

// Every rank stages everything; who wants the result reduces all of it by itself. Step s stages chunk s, and reduces
// chunk s-1, which all have staged by then.
void reduce_whole(const ReduceTask& task) {
  GroupState& group = task.group;
  const Part all{0, task.partition.total()};
  const std::size_t per_chunk = group.staging_bytes() / task.element;
  const bool wanted = task.wants_all();
  const auto stage = [&](std::size_t chunk) {
    if (task.call.operation == Operation::kReduce && wanted) return;  // no other rank reads the root's input
    const Part part = all.chunk(chunk, per_chunk);
    show_bytes(group.staging(group.rank(), chunk), task.input(part.begin), part.count * task.element);
  };
  const auto reduce_before = [&](std::size_t step) {
    if (!wanted) return;
    const Part part = all.chunk(step - 1, per_chunk);
    for (int peer = 0; peer < group.size(); ++peer)
      group.sources[peer] = peer == group.rank() ? task.input(part.begin) : group.staging(peer, step - 1);
    group.destinations[0] = task.output(part.begin);
    task.reduce(part.count, 1);
  };
  group.stream(chunks_of(all.count, per_chunk), 1, stage, reduce_before);
}

// Rank r reduces part r, whose chunks travel in lane r of every rank's staging memory.
class LaneReducer : ReduceTask {
 public:
  explicit LaneReducer(const ReduceTask& task)
      : ReduceTask(task),
        lane_(group.lane_bytes(group.size())),
        chunks_(chunks_of(partition.longest() * element, lane_)) {}

  // Step s: stages chunk s for the others; reduces the own lane of chunk s-1, which all have staged; copies the results
  // of chunk s-2, which all have reduced. A reduce_scatter is done after the second of these.
  void run() {
    group.stream(
        chunks_, scatters() ? 1 : 2, [&](std::size_t chunk) { stage(chunk); },
        [&](std::size_t step) {
          if (step <= chunks_) reduce_lane(step - 1);
          if (step > 1 && wants_all()) copy_out(step - 2);
        });
  }

 private:
  Part part_of(int rank, std::size_t chunk) const { return partition[rank].chunk(chunk, lane_ / element); }
  std::byte* lane_of(int staged_by, int owner, std::size_t chunk) const {
    return group.staging(staged_by, chunk) + static_cast<unsigned>(owner) * lane_;
  }

  void stage(std::size_t chunk) const {
    for (int owner = 0; owner < group.size(); ++owner) {
      if (owner == group.rank()) continue;
      const Part part = part_of(owner, chunk);
      show_bytes(lane_of(group.rank(), owner, chunk), input(part.begin), part.count * element);
    }
  }

  // The result goes into this rank's own lane, which stage() leaves free, for the others to copy.
  void reduce_lane(std::size_t chunk) const {
    const int me = group.rank();
    const Part part = part_of(me, chunk);
    if (part.count == 0) return;
    for (int peer = 0; peer < group.size(); ++peer)
      group.sources[peer] = peer == me ? input(part.begin) : lane_of(peer, me, chunk);
    if (scatters()) {
      group.destinations[0] = output(part.begin - partition[me].begin);
      return reduce(part.count, 1);
    }
    group.destinations[0] = lane_of(me, me, chunk);
    if (wants_all()) group.destinations[1] = output(part.begin);
    reduce(part.count, wants_all() ? 2 : 1, part.count * element < kStreamFromBytes ? 0 : 1);
  }

  void copy_out(std::size_t chunk) const {
    for (int owner = 0; owner < group.size(); ++owner) {
      if (owner == group.rank()) continue;
      const Part part = part_of(owner, chunk);
      copy_bytes(output(part.begin), lane_of(owner, owner, chunk), part.count * element);
    }
  }

  std::size_t lane_;  // bytes
  std::size_t chunks_;
};

}  // namespace

void reduce_staged(const ReduceTask& task) {
  task.group.make_staging();
  if (task.group.size() <= kReduceAllRanks && !task.scatters()) return reduce_whole(task);
  LaneReducer(task).run();
}

}  // namespace lockstep::shm
