#include "lockstep/collective/machines/machine_parts.h"

#include <algorithm>
#include <cstring>

#include "lockstep/collective/machines/machine_chunks.h"
#include "lockstep/collective/shm/reduce_kernels.h"
#include "lockstep/collective/shm/partition.h"
#include "lockstep/collective/torch_dtype.h"

namespace lockstep {
namespace {

using shm::Part;
using shm::Partition;
using PartCounts = std::vector<std::size_t>;

PartCounts counts_of(const Collective& call, int ranks) {
  if (!call.counts.empty()) return {call.counts.begin(), call.counts.end()};
  const torch::Tensor& own = call.operation == Operation::kReduceScatter ? call.output : call.input;
  return PartCounts(static_cast<std::size_t>(ranks), static_cast<std::size_t>(own.numel()));
}

}  // namespace

// One call, cut up. `whole` has the parts of all ranks, `own` this rank's.
struct HostParts::Job {
  Job(const Collective& call, const Machines& all_machines, int rank)
      : machines(all_machines),
        counts(counts_of(call, machines.ranks())),
        dtype(*to_dtype(call.input.scalar_type())),
        op(call.op),
        mine(part_of(rank)) {
    const std::size_t total = Partition::uneven(counts).total();
    const std::size_t most = chunk_bytes(total * size()) / static_cast<std::size_t>(machines.count()) / kCacheLine;
    wish = wish_of(call, total);
    slices = slices_for(total * size(), machines.slices());
    rounds = rounds_of(counts, machines, most * kCacheLine / size());
  }

  std::size_t size() const { return size_of(dtype); }
  Part part_of(int rank) const { return Partition::uneven(counts)[rank]; }
  const Part& piece(std::size_t round, int node) const { return rounds[round][static_cast<std::size_t>(node)]; }
  std::size_t elements(std::size_t round) const {
    std::size_t all = 0;
    for (const Part& piece : rounds[round]) all += piece.count;
    return all;
  }

  // Of a piece, the owner of `slice`'s elements, and their number for each local rank.
  Part slice(const Part& piece, int slice) const {
    if (slice >= slices) return {piece.begin + piece.count, 0};
    const Part within = Partition::even(piece.count, slices, kCacheLine / size())[slice];
    return {piece.begin + within.begin, within.count};
  }

  // The slices of one owner in the pieces of all machines but `except`, in the order of the machines.
  std::vector<Part> slices_of(std::size_t round, int owner, int except = -1) const {
    std::vector<Part> all;
    for (int node = 0; node < machines.count(); ++node)
      if (node != except) all.push_back(slice(piece(round, node), owner));
    return all;
  }

  // How many elements those of each local rank are together.
  PartCounts owned(std::size_t round, int local_size, int except = -1) const {
    PartCounts all(static_cast<std::size_t>(local_size), 0);
    for (int rank = 0; rank < local_size; ++rank)
      for (const Part& slice : slices_of(round, rank, except)) all[static_cast<std::size_t>(rank)] += slice.count;
    return all;
  }

  // How much of `range` belongs to each rank of a machine.
  PartCounts shares(const Part& range, int node) const {
    PartCounts all;
    for (const int rank : machines.ranks_on(node)) all.push_back(common(range, part_of(rank)).count);
    return all;
  }

  const Machines& machines;
  PartCounts counts;
  DType dtype;
  ReduceOp op;
  Part mine;
  Wish wish;
  int slices = 1;
  std::vector<Pieces> rounds;
  std::byte* whole = nullptr;
  std::byte* own = nullptr;

  std::byte* in_whole(const Part& range) const { return whole + range.begin * size(); }
  std::byte* in_own(const Part& range) const {
    return own + (std::clamp(range.begin, mine.begin, mine.begin + mine.count) - mine.begin) * size();
  }
};

// A round's memory and transfers. `packed`: the slices of owner 0 in all pieces, then those of owner 1, and so on, so
// that one call inside does for all of them.
struct HostParts::Lane {
  shm::Memory packed;
  shm::Memory slice_memory;        // this owner's slices, one after the other
  std::vector<std::byte*> slices;  // of each machine's piece
  shm::Memory received_memory;
  std::vector<std::byte*> received;  // from each machine
  HostLink::Transfers receives;
  HostLink::Transfers sends;
};

HostParts::HostParts(shm::Group& inside, HostLink* between, Machines machines, int rank)
    : inside_(inside), between_(between), machines_(std::move(machines)), rank_(rank), node_(machines_.node_of(rank)) {
  const auto nodes = static_cast<std::size_t>(machines_.count());
  for (auto& lane : lanes_) {
    lane = std::make_shared<Lane>();
    lane->slices.resize(nodes);
    lane->received.resize(nodes);
  }
}

void HostParts::give_up() {
  check_.give_up();
  for (const auto& lane : lanes_) {
    lane->receives.clear();
    lane->sends.clear();
  }
}

void HostParts::finish(Lane& lane) {
  if (between_ == nullptr) return;
  between_->wait(lane.receives);
  between_->wait(lane.sends);
}

bool HostParts::owns_slice(const Job& job) const { return inside_.rank() < job.slices; }

void HostParts::begin_check(const Job& job) {
  if (owns_slice(job)) check_.begin(*between_, job.wish);
  if (job.rounds.empty()) inside_.run_as(intent_of(job.wish), {.operation = Operation::kBarrier});  // nothing else is done inside
}

void HostParts::finish_check(const Job& job) {
  if (owns_slice(job)) check_.finish(*between_);
}

// ---- reduce_scatter

void HostParts::reduce_scatter(const Collective& call) {
  Job job(call, machines_, rank_);
  job.whole = static_cast<std::byte*>(const_cast<void*>(call.input.const_data_ptr()));
  job.own = static_cast<std::byte*>(call.output.mutable_data_ptr());
  begin_check(job);
  const std::size_t rounds = job.rounds.size();
  for (std::size_t step = 0; step <= rounds; ++step) {
    if (step < rounds) reduce_inside(job, step);
    if (step < rounds) send_to_owners(job, step);
    if (step == 0) finish_check(job);
    if (step > 0) reduce_between(job, step - 1);
    if (step > 0) deliver_inside(job, step - 1);
  }
}

void HostParts::reduce_inside(const Job& job, std::size_t round) {
  Lane& lane = lane_of(round);
  if (alone()) {
    for (int node = 0; node < machines_.count(); ++node)
      lane.slices[static_cast<std::size_t>(node)] = job.in_whole(job.piece(round, node));
    return;
  }
  const PartCounts counts = job.owned(round, inside_.size());
  const std::size_t mine = counts[static_cast<std::size_t>(inside_.rank())] * job.size();
  std::byte* slice = grown(inside_, lane.slice_memory, mine);
  run_inside(
      inside_, job.wish, round,
      Call{.operation = Operation::kReduceScatter, 
          .input = pack(job, round), .output = slice, .counts = counts, .dtype = job.dtype, .op = op_inside(job.op)});
  const auto own = job.slices_of(round, inside_.rank());
  for (std::size_t node = 0; node < own.size(); ++node) {
    lane.slices[node] = slice;
    slice += own[node].count * job.size();
  }
}

const std::byte* HostParts::pack(const Job& job, std::size_t round) {
  std::byte* const packed = grown(inside_, lane_of(round).packed, job.elements(round) * job.size());
  std::byte* end = packed;
  for (int owner = 0; owner < job.slices; ++owner)
    for (const Part& slice : job.slices_of(round, owner)) {
      std::memcpy(end, job.in_whole(slice), slice.count * job.size());
      end += slice.count * job.size();
    }
  return packed;
}

void HostParts::send_to_owners(const Job& job, std::size_t round) {
  if (!owns_slice(job)) return;
  Lane& lane = lane_of(round);
  const std::size_t mine = job.slice(job.piece(round, node_), inside_.rank()).count * job.size();
  std::byte* const room = grown(inside_, lane.received_memory, mine * static_cast<std::size_t>(machines_.count()));
  for (const int node : between_->others()) {
    const auto at = static_cast<std::size_t>(node);
    lane.received[at] = room + mine * at;
    const std::size_t theirs = job.slice(job.piece(round, node), inside_.rank()).count * job.size();
    between_->receive(node, lane.received[at], mine, lane.receives);
    between_->send(node, lane.slices[at], theirs, lane.sends);
  }
}

// A rank that is alone reduces into its output; others into the slice, for its ranks to fetch.
void HostParts::reduce_between(const Job& job, std::size_t round) {
  Lane& lane = lane_of(round);
  finish(lane);
  const Part mine = job.slice(job.piece(round, node_), inside_.rank());
  if (!owns_slice(job) || mine.count == 0) return;
  std::vector<const std::byte*> sources(lane.received.begin(), lane.received.end());
  std::byte* const own = lane.slices[static_cast<std::size_t>(node_)];
  sources[static_cast<std::size_t>(node_)] = own;
  std::byte* const result = alone() ? job.in_own(mine) : own;
  shm::reduce(
      {.sources = sources, .destinations = std::span(&result, 1), .count = mine.count, .divisor = machines_.ranks()},
      job.dtype, job.op);
}

void HostParts::deliver_inside(const Job& job, std::size_t round) {
  if (alone()) return;
  const Part& piece = job.piece(round, node_);
  PartCounts receive;
  for (int rank = 0; rank < inside_.size(); ++rank) receive.push_back(common(job.slice(piece, rank), job.mine).count);
  inside_.all_to_all({.input = lane_of(round).slices[static_cast<std::size_t>(node_)],
                      .output = job.in_own(piece),
                      .counts = job.shares(job.slice(piece, inside_.rank()), node_),
                      .receive_counts = receive,
                      .dtype = job.dtype});
}

// ---- all_gather

void HostParts::all_gather(const Collective& call) {
  Job job(call, machines_, rank_);
  job.whole = static_cast<std::byte*>(call.output.mutable_data_ptr());
  job.own = static_cast<std::byte*>(const_cast<void*>(call.input.const_data_ptr()));
  begin_check(job);
  const std::size_t rounds = job.rounds.size();
  for (std::size_t step = 0; step <= rounds; ++step) {
    if (step < rounds) gather_inside(job, step);
    if (step < rounds) send_to_all(job, step);
    if (step == 0) finish_check(job);
    if (step > 0) share_inside(job, step - 1);
  }
}

void HostParts::gather_inside(const Job& job, std::size_t round) {
  const Part& piece = job.piece(round, node_);
  if (alone()) {
    if (piece.count > 0) std::memcpy(job.in_whole(piece), job.in_own(piece), piece.count * job.size());
    return;
  }
  run_inside(inside_, job.wish, round,
             Call{.operation = Operation::kAllGather, .input = job.in_own(piece),
                            .output = job.in_whole(piece),
                            .counts = job.shares(piece, node_),
                            .dtype = job.dtype});
}

void HostParts::send_to_all(const Job& job, std::size_t round) {
  if (!owns_slice(job)) return;
  Lane& lane = lane_of(round);
  const Part mine = job.slice(job.piece(round, node_), inside_.rank());
  const PartCounts counts = job.owned(round, inside_.size(), node_);
  const std::size_t room = alone() ? 0 : counts[static_cast<std::size_t>(inside_.rank())] * job.size();
  std::byte* next = grown(inside_, lane.slice_memory, room);
  for (int node = 0; node < machines_.count(); ++node) {
    if (node == node_) continue;
    const Part theirs = job.slice(job.piece(round, node), inside_.rank());
    lane.received[static_cast<std::size_t>(node)] = alone() ? job.in_whole(theirs) : next;
    if (!alone()) next += theirs.count * job.size();
  }
  for (const int node : between_->others()) {
    const Part theirs = job.slice(job.piece(round, node), inside_.rank());
    between_->receive(node, lane.received[static_cast<std::size_t>(node)], theirs.count * job.size(), lane.receives);
    between_->send(node, job.in_whole(mine), mine.count * job.size(), lane.sends);
  }
}

void HostParts::share_inside(const Job& job, std::size_t round) {
  Lane& lane = lane_of(round);
  finish(lane);
  if (alone()) return;
  const PartCounts counts = job.owned(round, inside_.size(), node_);
  std::byte* const packed = grown(inside_, lane.packed, job.elements(round) * job.size());
  inside_.all_gather({.input = lane.slice_memory.data(), .output = packed, .counts = counts, .dtype = job.dtype});
  const std::byte* next = packed;
  for (int owner = 0; owner < job.slices; ++owner)
    for (const Part& slice : job.slices_of(round, owner, node_)) {
      std::memcpy(job.in_whole(slice), next, slice.count * job.size());
      next += slice.count * job.size();
    }
}

}  // namespace lockstep
