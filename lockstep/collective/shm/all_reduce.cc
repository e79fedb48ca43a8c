// SPDX-License-Identifier: Apache-2.0
#include "lockstep/collective/shm/all_reduce.h"

#include <algorithm>

#include "lockstep/collective/shm/all_reduce_staged.h"
#include "lockstep/collective/shm/copy.h"
#include "lockstep/collective/shm/reduce_kernels.h"
#include "lockstep/collective/shm/reduce_task.h"
#include "lockstep/collective/shm/thresholds.h"

namespace lockstep::shm {
namespace {

bool within_reach(Place place) { return place.kind == Place::Kind::kArena || place.kind == Place::Kind::kAddress; }

class DirectReducer {
 public:
  DirectReducer(GroupState& group, const ReduceTask& task)
      : group_(group), task_(task), element_(task.element()), bytes_(task.bytes()) {}

  void run() {
    if (group_.size() == 1) return alone();
    announce();
    if (all_within_reach())
      direct();
    else if (fits_slot())
      one_shot();
    else
      reduce_staged(group_, task_);
  }

 private:
  bool wants_all() const { return task_.wants_all(group_.rank()); }
  bool fits_slot() const { return bytes_ <= one_shot_reduction_bytes(group_.size()); }

  void alone();
  void announce();
  void one_shot();
  const std::byte* shown_by(int peer) const;
  bool all_within_reach() const;
  void direct();
  std::size_t find_outputs(std::size_t offset);

  GroupState& group_;
  const ReduceTask& task_;
  std::size_t element_;
  std::size_t bytes_;
};

void DirectReducer::alone() {
  group_.sources[0] = task_.input();
  group_.destinations[0] = task_.output();
  task_.reduce(group_, task_.partition.total(), 1);
}

// Says where input and output lie. Small data is shown where that costs least: up to 24 bytes in the announcement
// itself, then in the slot where some peer could not reach it in place.
void DirectReducer::announce() {
  if (bytes_ <= Announcement::kLineBytes && fits_slot()) return group_.arrive_with(task_.input(), bytes_);
  Place input = group_.locate(task_.input(), bytes_);
  const Place output = wants_all() ? group_.locate(task_.output(), bytes_) : Place{};
  const bool out_of_reach =
      input.kind == Place::Kind::kPrivate || (wants_all() && output.kind == Place::Kind::kPrivate);
  if (fits_slot() && (out_of_reach || bytes_ <= kAlwaysOneShotBytes)) {
    show_bytes(group_.slot(group_.rank()), task_.input(), bytes_);
    input = {.kind = Place::Kind::kSlot};
  }
  group_.arrive(input, output);
}

const std::byte* DirectReducer::shown_by(int peer) const {
  const Place place = group_.announcement(peer).input();
  if (place.kind == Place::Kind::kSlot) return group_.slot(peer);
  if (place.kind != Place::Kind::kLine) return group_.pointer(place, bytes_);
  std::byte* const line = group_.lines[peer].data();
  group_.announcement(peer).read_line(line);
  return line;
}

// Every rank reads p*K (or of its part) and reduces by itself. Slots and lines need no second wait: they are written
// again in collective s+2, and nobody gets there before all have left s. A rank whose input is read in place has to
// wait until its peers have read it, and keeps its own result in its slot until then: input and output may be the same.
void DirectReducer::one_shot() {
  const Part part = task_.scatters() ? task_.partition[group_.rank()] : Part{0, task_.partition.total()};
  bool read_in_place = false;
  for (int peer = 0; peer < group_.size(); ++peer) {
    group_.sources[peer] = shown_by(peer) + part.begin * element_;
    read_in_place |= within_reach(group_.announcement(peer).input());
  }
  const bool wanted = task_.scatters() || wants_all();
  const bool mine_in_place = within_reach(group_.announcement(group_.rank()).input());
  group_.destinations[0] = mine_in_place ? group_.slot(group_.rank()) : task_.output();
  if (wanted) {
    const GroupState::PeerAccess access(group_);
    task_.reduce(group_, part.count, 1);
  }
  if (!read_in_place) return;
  group_.post_and_wait_all(1);
  group_.end(1);
  if (wanted && mine_in_place) copy_bytes(task_.output(), group_.slot(group_.rank()), part.count * element_);
}

bool DirectReducer::all_within_reach() const {
  for (int peer = 0; peer < group_.size(); ++peer) {
    if (!within_reach(group_.announcement(peer).input())) return false;
    if (task_.wants_all(peer) && !within_reach(group_.announcement(peer).output())) return false;
  }
  return true;
}

// Reads K/p of each of p inputs, writes K/p to each output. Ranks touch disjoint parts, so in place is safe: nobody else
// reads or writes part r. The wait at the end says that all parts are written and that no input is read any more.
void DirectReducer::direct() {
  const Part part = task_.partition[group_.rank()];
  const std::size_t offset = part.begin * element_;
  if (part.count > 0) {
    const GroupState::PeerAccess access(group_);
    for (int peer = 0; peer < group_.size(); ++peer)
      group_.sources[peer] = group_.pointer(group_.announcement(peer).input(), bytes_) + offset;
    task_.reduce(group_, part.count, find_outputs(offset));
  }
  group_.post_and_wait_all(1);
  group_.end(1);
}

// Where the own part goes. Several ranks may name the same memory as their output: it is written once.
std::size_t DirectReducer::find_outputs(std::size_t offset) {
  auto& outputs = group_.destinations;
  if (task_.scatters()) {
    outputs[0] = task_.output();
    return 1;
  }
  int found = 0;
  for (int peer = 0; peer < group_.size(); ++peer) {
    if (!task_.wants_all(peer)) continue;
    std::byte* const output = group_.pointer(group_.announcement(peer).output(), bytes_) + offset;
    if (std::find(outputs.begin(), outputs.begin() + found, output) == outputs.begin() + found)
      outputs[found++] = output;
  }
  return static_cast<unsigned>(found);
}

// Parts begin on cache lines, if the array does: then no two ranks write to the same line.
Partition partition_of(const Call& call, int ranks) {
  if (call.operation == Operation::kReduceScatter) return Partition::of(call, ranks);
  return Partition::even(call.count, ranks, kCacheLine / size_of(call.dtype));
}

}  // namespace

void ReduceTask::reduce(GroupState& group, std::size_t count, std::size_t outputs, std::size_t streamed) const {
  shm::reduce({.sources = group.sources,
               .destinations = std::span(group.destinations).first(outputs),
               .count = count,
               .divisor = group.size(),
               .streamed = streamed},
              call.dtype, call.op);
}

void all_reduce(GroupState& group, const Call& call) {
  group.begin(signature_of(call));
  DirectReducer(group, {call, partition_of(call, group.size())}).run();
}

}  // namespace lockstep::shm
