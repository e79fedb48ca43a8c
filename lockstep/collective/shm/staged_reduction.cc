#include "lockstep/collective/shm/staged_reduction.h"

#include <algorithm>

#include "lockstep/collective/shm/copy.h"
#include "lockstep/collective/shm/thresholds.h"

namespace lockstep::shm {
namespace {

std::size_t chunks_of(std::size_t bytes, std::size_t chunk) { return (bytes + chunk - 1) / chunk; }

// `per_chunk` elements of `part` travel in each chunk.
Part part_of_chunk(Part part, std::size_t per_chunk, std::size_t chunk) {
  const std::size_t skipped = std::min(part.count, chunk * per_chunk);
  return {part.begin + skipped, std::min(per_chunk, part.count - skipped)};
}

// Every rank stages everything; who wants the result reduces it all by itself.
class WholeReducer {
 public:
  WholeReducer(GroupState& group, const ReductionJob& job)
      : group_(group), job_(job), element_(size_of(job.dtype)), per_chunk_(group.staging_bytes() / element_) {}

  void run() {
    const std::size_t chunks = chunks_of(job_.split.total(), per_chunk_);
    group_.stream(
        chunks, 1, [&](std::size_t chunk) { stage(chunk); }, [&](std::size_t step) { reduce_chunk(step - 1); });
  }

 private:
  bool wanted_here() const { return job_.everything_wanted_by(group_.rank()); }
  Part part_of(std::size_t chunk) const { return part_of_chunk({0, job_.split.total()}, per_chunk_, chunk); }

  void stage(std::size_t chunk) const {
    if (job_.wanted == Wanted::kByRoot && wanted_here()) return;  // nobody else reads it
    const Part part = part_of(chunk);
    show_bytes(group_.staging(group_.rank(), chunk), job_.input + part.begin * element_, part.count * element_);
  }

  void reduce_chunk(std::size_t chunk) {
    if (!wanted_here()) return;
    const Part part = part_of(chunk);
    for (int peer = 0; peer < group_.size(); ++peer)
      group_.sources[static_cast<std::size_t>(peer)] =
          peer == group_.rank() ? job_.input + part.begin * element_ : group_.staging(peer, chunk);
    group_.destinations[0] = job_.output + part.begin * element_;
    reduce_sources(group_, job_, part.count, 1);
  }

  GroupState& group_;
  const ReductionJob& job_;
  std::size_t element_;
  std::size_t per_chunk_;
};

// Rank r reduces part r, whose chunks travel in lane r.
class LaneReducer {
 public:
  LaneReducer(GroupState& group, const ReductionJob& job)
      : group_(group),
        job_(job),
        element_(size_of(job.dtype)),
        lane_(group.staging_bytes() / static_cast<std::size_t>(group.size()) / kCacheLine * kCacheLine),
        chunks_(chunks_of(job.split.longest() * element_, lane_)) {}

  void run() {
    group_.stream(
        chunks_, job_.wanted == Wanted::kByOwner ? 1 : 2, [&](std::size_t chunk) { stage(chunk); },
        [&](std::size_t step) {
          if (step <= chunks_) reduce_lane(step - 1);
          if (step > 1 && job_.everything_wanted_by(group_.rank())) copy_out(step - 2);
        });
  }

 private:
  Part part_of(int rank, std::size_t chunk) const { return part_of_chunk(job_.split[rank], lane_ / element_, chunk); }
  std::byte* lane_of(int staged_by, int owner, std::size_t chunk) const {
    return group_.staging(staged_by, chunk) + static_cast<std::size_t>(owner) * lane_;
  }

  void stage(std::size_t chunk) const;
  void reduce_lane(std::size_t chunk);
  void copy_out(std::size_t chunk) const;

  GroupState& group_;
  const ReductionJob& job_;
  std::size_t element_;
  std::size_t lane_;  // bytes
  std::size_t chunks_;
};

void LaneReducer::stage(std::size_t chunk) const {
  for (int owner = 0; owner < group_.size(); ++owner) {
    if (owner == group_.rank()) continue;
    const Part part = part_of(owner, chunk);
    show_bytes(lane_of(group_.rank(), owner, chunk), job_.input + part.begin * element_, part.count * element_);
  }
}

void LaneReducer::reduce_lane(std::size_t chunk) {
  const int me = group_.rank();
  const Part part = part_of(me, chunk);
  if (part.count == 0) return;
  for (int peer = 0; peer < group_.size(); ++peer)
    group_.sources[static_cast<std::size_t>(peer)] =
        peer == me ? job_.input + part.begin * element_ : lane_of(peer, me, chunk);
  if (job_.wanted == Wanted::kByOwner) {
    group_.destinations[0] = job_.output + (part.begin - job_.split[me].begin) * element_;
    return reduce_sources(group_, job_, part.count, 1);
  }
  std::size_t outputs = 0;
  group_.destinations[outputs++] = lane_of(me, me, chunk);
  if (job_.everything_wanted_by(me)) group_.destinations[outputs++] = job_.output + part.begin * element_;
  reduce_sources(group_, job_, part.count, outputs, part.count * element_ < kStreamFromBytes ? 0 : 1);
}

void LaneReducer::copy_out(std::size_t chunk) const {
  for (int owner = 0; owner < group_.size(); ++owner) {
    if (owner == group_.rank()) continue;
    const Part part = part_of(owner, chunk);
    copy_bytes(job_.output + part.begin * element_, lane_of(owner, owner, chunk), part.count * element_);
  }
}

}  // namespace

void reduce_staged(GroupState& group, const ReductionJob& job) {
  group.make_staging();
  if (group.size() <= kReduceAllRanks && job.wanted != Wanted::kByOwner) return WholeReducer(group, job).run();
  LaneReducer(group, job).run();
}

}  // namespace lockstep::shm
