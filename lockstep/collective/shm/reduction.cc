#include "lockstep/collective/shm/reduction.h"

#include <algorithm>

#include "lockstep/collective/shm/copy.h"
#include "lockstep/collective/shm/reduce_kernels.h"
#include "lockstep/collective/shm/shape.h"
#include "lockstep/collective/shm/split.h"
#include "lockstep/collective/shm/thresholds.h"

namespace lockstep::shm {
namespace {

enum class Wanted { kByAll, kByRoot, kByOwner };  // whose output receives the result of a part

bool within_reach(Place place) { return place.kind == Place::Kind::kArena || place.kind == Place::Kind::kAddress; }

struct Job {
  const std::byte* input;
  std::byte* output;  // everything, or for kByOwner the own part
  DType dtype;
  ReduceOp op;
  Split split;
  Wanted wanted;
  int root = -1;
};

class Reducer {
 public:
  Reducer(GroupState& group, const Job& job) : group_(group), job_(job), element_(size_of(job.dtype)) {}

  void run() {
    if (group_.size() == 1) return alone();
    show();
    if (all_within_reach())
      direct();
    else if (fits_slot())
      one_shot();
    else
      staged();
  }

 private:
  bool wants_everything() const {
    return job_.wanted == Wanted::kByAll || (job_.wanted == Wanted::kByRoot && job_.root == group_.rank());
  }
  std::size_t bytes() const { return job_.split.total() * element_; }
  std::size_t bytes_of(Part part) const { return part.count * element_; }
  bool fits_slot() const { return bytes() <= one_shot_reduction_bytes(group_.size()); }

  Place locate_output() const { return wants_everything() ? group_.locate(job_.output, bytes()) : Place{}; }

  void reduce_into(std::size_t count, std::size_t outputs) {
    reduce({.sources = group_.sources,
            .destinations = std::span(group_.destinations).first(outputs),
            .count = count,
            .divisor = group_.size()},
           job_.dtype, job_.op);
  }

  void alone();
  void show();
  void one_shot();
  const std::byte* shown_by(int peer) const;
  bool all_within_reach() const;
  void direct();
  std::size_t find_outputs(std::size_t offset);
  void staged();
  Part part_of_chunk(int rank, std::size_t chunk) const;
  void copy_in(std::size_t chunk);
  void reduce_lane(std::size_t chunk);
  void copy_out(std::size_t chunk);

  GroupState& group_;
  const Job& job_;
  std::size_t element_;
  std::size_t lane_ = 0;          // bytes
  std::byte* staging_ = nullptr;  // the own
};

void Reducer::alone() {
  group_.sources[0] = job_.input;
  group_.destinations[0] = job_.output;
  reduce_into(job_.split.total(), 1);
}

// Small data is shown where it costs least: in the announcement, then, if a peer could not reach it, in the slot.
void Reducer::show() {
  if (bytes() <= Announcement::kLineBytes && fits_slot()) return group_.arrive_with(job_.input, bytes());
  Place input = group_.locate(job_.input, bytes());
  const Place output = locate_output();
  const bool out_of_reach =
      input.kind == Place::Kind::kPrivate ||
      (job_.wanted != Wanted::kByOwner && wants_everything() && output.kind == Place::Kind::kPrivate);
  if (fits_slot() && (out_of_reach || bytes() <= kAlwaysOneShotBytes)) {
    copy_bytes(group_.slot(group_.rank()), job_.input, bytes());
    input = {.kind = Place::Kind::kSlot};
  }
  group_.arrive(input, output);
}

const std::byte* Reducer::shown_by(int peer) const {
  const Place place = group_.announcement(peer).input();
  if (place.kind == Place::Kind::kSlot) return group_.slot(peer);
  if (place.kind != Place::Kind::kLine) return group_.pointer(place, bytes());
  std::byte* const line = group_.lines[static_cast<std::size_t>(peer)].data();
  group_.announcement(peer).read_line(line);
  return line;
}

void Reducer::one_shot() {
  const Part part = job_.wanted == Wanted::kByOwner ? job_.split[group_.rank()] : Part{0, job_.split.total()};
  bool read_in_place = false;
  for (int peer = 0; peer < group_.size(); ++peer) {
    group_.sources[static_cast<std::size_t>(peer)] = shown_by(peer) + part.begin * element_;
    read_in_place |= within_reach(group_.announcement(peer).input());
  }
  // Peers may still read this rank's input where it lies, and it may be its output too: by way of the slot then.
  const bool wanted = job_.wanted == Wanted::kByOwner || wants_everything();
  const bool shown_in_place = within_reach(group_.announcement(group_.rank()).input());
  group_.destinations[0] = shown_in_place ? group_.slot(group_.rank()) : job_.output;
  if (wanted) {
    const GroupState::Touch touch(group_);
    reduce_into(part.count, 1);
  }
  if (!read_in_place) return;
  group_.meet(1);
  group_.end(1);
  if (wanted && shown_in_place) copy_bytes(job_.output, group_.slot(group_.rank()), bytes_of(part));
}

bool Reducer::all_within_reach() const {
  for (int peer = 0; peer < group_.size(); ++peer) {
    const bool written = job_.wanted == Wanted::kByAll || (job_.wanted == Wanted::kByRoot && peer == job_.root);
    if (!within_reach(group_.announcement(peer).input())) return false;
    if (written && !within_reach(group_.announcement(peer).output())) return false;
  }
  return true;
}

void Reducer::direct() {
  const Part part = job_.split[group_.rank()];
  const std::size_t offset = part.begin * element_;
  if (part.count > 0) {
    const GroupState::Touch touch(group_);
    for (int peer = 0; peer < group_.size(); ++peer)
      group_.sources[static_cast<std::size_t>(peer)] =
          group_.pointer(group_.announcement(peer).input(), bytes()) + offset;
    reduce_into(part.count, find_outputs(offset));
  }
  group_.meet(1);
  group_.end(1);
}

// Where the own part goes. Ranks may name one and the same memory as their output: it is written once.
std::size_t Reducer::find_outputs(std::size_t offset) {
  std::vector<std::byte*>& outputs = group_.destinations;
  if (job_.wanted == Wanted::kByOwner) {
    outputs[0] = job_.output;
    return 1;
  }
  std::size_t found = 0;
  for (int peer = 0; peer < group_.size(); ++peer) {
    if (job_.wanted == Wanted::kByRoot && peer != job_.root) continue;
    const Place place = group_.announcement(peer).output();
    std::byte* const output = group_.pointer(place, bytes()) + offset;
    const auto end = outputs.begin() + static_cast<std::ptrdiff_t>(found);
    if (std::find(outputs.begin(), end, output) == end) outputs[found++] = output;
  }
  return found;
}

void Reducer::staged() {
  staging_ = group_.make_staging();
  lane_ = group_.staging_bytes() / static_cast<std::size_t>(group_.size()) / kCacheLine * kCacheLine;
  const std::size_t chunks = (job_.split.longest() * element_ + lane_ - 1) / lane_;
  for (std::size_t chunk = 0; chunk <= chunks; ++chunk) {
    if (chunk < chunks) copy_in(chunk);
    group_.meet(static_cast<std::uint32_t>(chunk + 1));
    if (chunk > 0 && wants_everything()) copy_out(chunk - 1);
    if (chunk < chunks) reduce_lane(chunk);
  }
  group_.meet(static_cast<std::uint32_t>(chunks + 2));  // nobody reads this rank's staging memory any more
  group_.end(static_cast<std::uint32_t>(chunks + 2));
}

// The elements of `rank`'s part that travel in `chunk`.
Part Reducer::part_of_chunk(int rank, std::size_t chunk) const {
  const Part part = job_.split[rank];
  const std::size_t per_lane = lane_ / element_;
  const std::size_t skipped = std::min(part.count, chunk * per_lane);
  return {part.begin + skipped, std::min(per_lane, part.count - skipped)};
}

void Reducer::copy_in(std::size_t chunk) {
  std::byte* const half = staging_ + chunk % 2 * group_.staging_bytes();
  for (int owner = 0; owner < group_.size(); ++owner) {
    if (owner == group_.rank()) continue;
    const Part part = part_of_chunk(owner, chunk);
    copy_bytes(half + static_cast<std::size_t>(owner) * lane_, job_.input + part.begin * element_, bytes_of(part));
  }
}

void Reducer::reduce_lane(std::size_t chunk) {
  const Part part = part_of_chunk(group_.rank(), chunk);
  if (part.count == 0) return;
  const std::size_t my_lane = static_cast<std::size_t>(group_.rank()) * lane_;
  for (int peer = 0; peer < group_.size(); ++peer)
    group_.sources[static_cast<std::size_t>(peer)] = group_.staging(peer, static_cast<std::uint32_t>(chunk)) + my_lane;
  group_.sources[static_cast<std::size_t>(group_.rank())] = job_.input + part.begin * element_;
  std::size_t outputs = 0;
  if (job_.wanted != Wanted::kByOwner)
    group_.destinations[outputs++] = staging_ + chunk % 2 * group_.staging_bytes() + my_lane;
  if (job_.wanted == Wanted::kByOwner)
    group_.destinations[outputs++] = job_.output + (part.begin - job_.split[group_.rank()].begin) * element_;
  else if (wants_everything())
    group_.destinations[outputs++] = job_.output + part.begin * element_;
  reduce_into(part.count, outputs);
}

void Reducer::copy_out(std::size_t chunk) {
  for (int owner = 0; owner < group_.size(); ++owner) {
    if (owner == group_.rank()) continue;
    const Part part = part_of_chunk(owner, chunk);
    if (part.count == 0) continue;
    copy_bytes(job_.output + part.begin * element_,
               group_.staging(owner, static_cast<std::uint32_t>(chunk)) + static_cast<std::size_t>(owner) * lane_,
               bytes_of(part));
  }
}

void run_job(GroupState& group, const Intent& intent, const Job& job) {
  group.begin(intent);
  Reducer(group, job).run();
}

// Parts begin on cache lines, if the array does: no two ranks write to the same line.
Split even_split(const GroupState& group, std::size_t count, DType dtype) {
  return Split::even(count, group.size(), kCacheLine / size_of(dtype));
}

}  // namespace

void all_reduce(GroupState& group, const AllReduce& call) {
  run_job(group,
          {.operation = Operation::kAllReduce,
           .dtype = call.dtype,
           .op = call.op,
           .algorithm = call.algorithm,
           .count = call.count},
          {.input = static_cast<const std::byte*>(call.input),
           .output = static_cast<std::byte*>(call.output),
           .dtype = call.dtype,
           .op = call.op,
           .split = even_split(group, call.count, call.dtype),
           .wanted = Wanted::kByAll});
}

void reduce(GroupState& group, const Reduce& call) {
  run_job(group,
          {.operation = Operation::kReduce, .dtype = call.dtype, .op = call.op, .root = call.root, .count = call.count},
          {.input = static_cast<const std::byte*>(call.input),
           .output = static_cast<std::byte*>(call.output),
           .dtype = call.dtype,
           .op = call.op,
           .split = even_split(group, call.count, call.dtype),
           .wanted = Wanted::kByRoot,
           .root = call.root});
}

void reduce_scatter(GroupState& group, const ReduceScatter& call) {
  const Split split = call.counts.empty() ? Split::equal(call.count, group.size()) : Split::uneven(call.counts);
  run_job(group,
          {.operation = Operation::kReduceScatter,
           .dtype = call.dtype,
           .op = call.op,
           .count = split.total(),
           .shape = shape_of(call.counts)},
          {.input = static_cast<const std::byte*>(call.input),
           .output = static_cast<std::byte*>(call.output),
           .dtype = call.dtype,
           .op = call.op,
           .split = split,
           .wanted = Wanted::kByOwner});
}

}  // namespace lockstep::shm
