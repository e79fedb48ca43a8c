#include "lockstep/collective/shm/reduction.h"

#include <algorithm>

#include "lockstep/collective/shm/copy.h"
#include "lockstep/collective/shm/reduce_kernels.h"
#include "lockstep/collective/shm/reduction_job.h"
#include "lockstep/collective/shm/shape.h"
#include "lockstep/collective/shm/split.h"
#include "lockstep/collective/shm/staged_reduction.h"
#include "lockstep/collective/shm/thresholds.h"

namespace lockstep::shm {
namespace {

bool within_reach(Place place) { return place.kind == Place::Kind::kArena || place.kind == Place::Kind::kAddress; }

class Reducer {
 public:
  Reducer(GroupState& group, const ReductionJob& job) : group_(group), job_(job), element_(size_of(job.dtype)) {}

  void run() {
    if (group_.size() == 1) return alone();
    show();
    if (all_within_reach())
      direct();
    else if (fits_slot())
      one_shot();
    else
      reduce_staged(group_, job_);
  }

 private:
  bool wants_everything() const { return job_.everything_wanted_by(group_.rank()); }
  std::size_t bytes() const { return job_.bytes(); }
  std::size_t bytes_of(Part part) const { return part.count * element_; }
  bool fits_slot() const { return bytes() <= one_shot_reduction_bytes(group_.size()); }

  Place locate_output() const { return wants_everything() ? group_.locate(job_.output, bytes()) : Place{}; }

  void reduce_into(std::size_t count, std::size_t outputs) { reduce_sources(group_, job_, count, outputs); }

  void alone();
  void show();
  void one_shot();
  const std::byte* shown_by(int peer) const;
  bool all_within_reach() const;
  void direct();
  std::size_t find_outputs(std::size_t offset);

  GroupState& group_;
  const ReductionJob& job_;
  std::size_t element_;
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
    show_bytes(group_.slot(group_.rank()), job_.input, bytes());
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

void run_job(GroupState& group, const Intent& intent, const ReductionJob& job) {
  group.begin(intent);
  Reducer(group, job).run();
}

// Parts begin on cache lines, if the array does: no two ranks write to the same line.
Split even_split(const GroupState& group, std::size_t count, DType dtype) {
  return Split::even(count, group.size(), kCacheLine / size_of(dtype));
}

}  // namespace

void reduce_sources(GroupState& group, const ReductionJob& job, std::size_t count, std::size_t outputs,
                    std::size_t streamed) {
  reduce({.sources = group.sources,
          .destinations = std::span(group.destinations).first(outputs),
          .count = count,
          .divisor = group.size(),
          .streamed = streamed},
         job.dtype, job.op);
}

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
