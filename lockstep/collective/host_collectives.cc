#include "lockstep/collective/host_collectives.h"

#include <algorithm>
#include <cstring>

#include "lockstep/base/error.h"
#include "lockstep/base/text.h"
#include "lockstep/collective/shm/reduce_kernels.h"
#include "lockstep/collective/shm/split.h"
#include "lockstep/collective/shm_dtype.h"

namespace lockstep {
namespace {

using shm::Part;
using shm::Split;

constexpr std::size_t kOneShotBytes = 16384;
constexpr std::size_t kSmallestChunk = std::size_t{512} << 10;
constexpr std::size_t kLargestChunk = std::size_t{4} << 20;
constexpr std::size_t kChunksWanted = 8;
constexpr std::size_t kAlignment = 64;

std::size_t chunk_bytes(std::size_t bytes) {
  const std::size_t wanted = std::clamp(bytes / kChunksWanted, kSmallestChunk, kLargestChunk);
  return wanted / kAlignment * kAlignment;
}

}  // namespace

int Machines::count() const { return std::ranges::max(nodes) + 1; }

std::vector<int> Machines::ranks_on(int node) const {
  std::vector<int> ranks;
  for (std::size_t rank = 0; rank < nodes.size(); ++rank)
    if (nodes[rank] == node) ranks.push_back(static_cast<int>(rank));
  return ranks;
}

int Machines::local_rank(int rank) const {
  return static_cast<int>(std::count(nodes.begin(), nodes.begin() + rank, nodes[static_cast<std::size_t>(rank)]));
}

int Machines::slices() const {
  std::size_t least = nodes.size();
  for (int node = 0; node < count(); ++node) least = std::min(least, ranks_on(node).size());
  return static_cast<int>(least);
}

// One call, cut up.
struct HostCollectives::Job {
  Job(const Collective& call, int slices_of_chunk, int machines)
      : operation(call.operation),
        data(static_cast<std::byte*>(call.output.mutable_data_ptr())),
        count(static_cast<std::size_t>(call.output.numel())),
        dtype(*to_shm_dtype(call.output.scalar_type())),
        op(call.op),
        root(call.root),
        one_shot(count * size() <= kOneShotBytes),
        slices(one_shot ? 1 : slices_of_chunk),
        nodes(machines),
        chunk_count(chunk_bytes(count * size()) / size()),
        chunks((count + chunk_count - 1) / chunk_count) {}

  std::size_t size() const { return shm::size_of(dtype); }
  std::size_t begin(std::size_t chunk) const { return chunk * chunk_count; }
  std::size_t elements(std::size_t chunk) const { return std::min(chunk_count, count - begin(chunk)); }
  std::byte* at(std::size_t chunk) const { return data + begin(chunk) * size(); }
  Split cut_chunk(std::size_t chunk) const { return Split::even(elements(chunk), slices, kAlignment / size()); }
  Part slice(std::size_t chunk, int local_rank) const { return cut_chunk(chunk)[local_rank]; }
  Split cut_slice(std::size_t slice_count) const { return Split::even(slice_count, nodes, kAlignment / size()); }

  // What shared memory is told: a part for each local rank, empty for those that own no slice.
  std::vector<std::size_t> counts(std::size_t chunk, int local_size) const {
    std::vector<std::size_t> all;
    for (int rank = 0; rank < local_size; ++rank) all.push_back(rank < slices ? slice(chunk, rank).count : 0);
    return all;
  }

  // The machine's sum is divided when machines are added up.
  shm::ReduceOp op_inside() const { return op == ReduceOp::kMean ? ReduceOp::kSum : op; }

  Operation operation;
  std::byte* data;
  std::size_t count;
  shm::DType dtype;
  shm::ReduceOp op;
  int root;
  bool one_shot;
  int slices;
  int nodes;
  std::size_t chunk_count;
  std::size_t chunks;
};

// A chunk's memory and transfers. `slice` is the owner's slice: the tensor's own memory where a machine has one rank.
struct HostCollectives::Lane {
  std::byte* room(shm::Group& group, shm::Memory& memory, std::size_t bytes) {
    if (memory.size() < bytes) memory = group.allocate(bytes);
    return memory.data();
  }

  shm::Memory slice_memory;
  shm::Memory received_memory;
  std::byte* slice = nullptr;
  std::vector<std::byte*> received;  // of each machine: its share of the part that is reduced here
  HostLink::Transfers receives;
  HostLink::Transfers sends;
};

HostCollectives::HostCollectives(shm::Group& inside, HostLink* between, Machines machines, int node)
    : inside_(inside), between_(between), machines_(std::move(machines)), node_(node) {
  for (auto& lane : lanes_) lane = std::make_shared<Lane>();
}

void HostCollectives::give_up() {
  checks_.clear();
  for (const auto& lane : lanes_) {
    lane->receives.clear();
    lane->sends.clear();
  }
  if (between_ != nullptr) between_->forget();
}

bool HostCollectives::owns_slice(const Job& job) const { return inside_.rank() < job.slices; }

// ---- Machines that want different things would otherwise take each other's bytes for what they are not.

void HostCollectives::begin_check(const Job& job) {
  said_.assign(static_cast<std::size_t>(job.nodes), {});
  auto& mine = said_[static_cast<std::size_t>(node_)];
  mine = {static_cast<std::int64_t>(job.operation), static_cast<std::int64_t>(job.dtype),
          static_cast<std::int64_t>(job.op), job.root, static_cast<std::int64_t>(job.count)};
  for (int node = 0; node < job.nodes; ++node) {
    if (node == node_) continue;
    auto& theirs = said_[static_cast<std::size_t>(node)];
    between_->receive(node, reinterpret_cast<std::byte*>(theirs.data()), sizeof theirs, checks_);
    between_->send(node, reinterpret_cast<const std::byte*>(mine.data()), sizeof mine, checks_);
  }
}

void HostCollectives::finish_check(const Job& job) {
  between_->wait(checks_);
  const auto text = [](const Wish& said) {
    const auto operation = static_cast<Operation>(said[0]);
    return concat(shm::to_string(operation), " of ", said[4], " ", shm::to_string(static_cast<shm::DType>(said[1])),
                  " (", shm::to_string(static_cast<ReduceOp>(said[2])), ", root ", said[3], ")");
  };
  const auto& mine = said_[static_cast<std::size_t>(node_)];
  for (int node = 0; node < job.nodes; ++node)
    if (const auto& theirs = said_[static_cast<std::size_t>(node)]; theirs != mine)
      throw MismatchError(
          {.what = concat("machine ", node_, " wants ", text(mine), ", machine ", node, " wants ", text(theirs)),
           .likely = "ranks that do not make the same calls in the same order",
           .next = "compare the programs and their inputs on both machines"});
}

// ---- all_reduce

void HostCollectives::all_reduce(const Collective& call) {
  const Job job(call, machines_.slices(), machines_.count());
  if (owns_slice(job)) begin_check(job);
  for (std::size_t step = 0; step < job.chunks + 2; ++step) {
    if (step < job.chunks) reduce_inside(job, step);
    if (step == 0 && owns_slice(job)) finish_check(job);
    if (step < job.chunks) send_parts(job, step);
    if (step >= 1 && step <= job.chunks) reduce_between(job, step - 1);
    if (step >= 2) share_inside(job, step - 2);
  }
}

void HostCollectives::reduce_inside(const Job& job, std::size_t chunk) {
  Lane& lane = lane_of(chunk);
  if (alone()) {
    lane.slice = job.at(chunk);
    return;
  }
  const std::vector<std::size_t> counts = job.counts(chunk, inside_.size());
  const std::size_t mine = counts[static_cast<std::size_t>(inside_.rank())];
  lane.slice = lane.room(inside_, lane.slice_memory, mine * job.size());
  inside_.reduce_scatter(
      {.input = job.at(chunk), .output = lane.slice, .counts = counts, .dtype = job.dtype, .op = job.op_inside()});
}

void HostCollectives::send_parts(const Job& job, std::size_t chunk) {
  if (!owns_slice(job)) return;
  Lane& lane = lane_of(chunk);
  const std::size_t slice_count = job.slice(chunk, inside_.rank()).count;
  const Split parts = job.cut_slice(slice_count);
  const auto part_for = [&](int node) { return job.one_shot ? Part{0, slice_count} : parts[node]; };
  const std::size_t mine = part_for(node_).count * job.size();
  std::byte* const room = lane.room(inside_, lane.received_memory, mine * static_cast<std::size_t>(job.nodes));
  lane.received.clear();
  for (int node = 0; node < job.nodes; ++node) {
    lane.received.push_back(room + mine * static_cast<std::size_t>(node));
    if (node == node_) continue;
    const Part theirs = part_for(node);
    between_->receive(node, lane.received.back(), mine, lane.receives);
    between_->send(node, lane.slice + theirs.begin * job.size(), theirs.count * job.size(), lane.sends);
  }
}

void HostCollectives::reduce_between(const Job& job, std::size_t chunk) {
  if (!owns_slice(job)) return;
  Lane& lane = lane_of(chunk);
  between_->wait(lane.receives);
  if (job.one_shot) between_->wait(lane.sends);  // the slice is about to change
  const std::size_t slice_count = job.slice(chunk, inside_.rank()).count;
  const Split parts = job.cut_slice(slice_count);
  const Part mine = job.one_shot ? Part{0, slice_count} : parts[node_];
  std::byte* const result = lane.slice + mine.begin * job.size();
  std::vector<const std::byte*> sources(lane.received.begin(), lane.received.end());
  sources[static_cast<std::size_t>(node_)] = result;
  shm::reduce({.sources = sources,
               .destinations = std::span(&result, 1),
               .count = mine.count,
               .divisor = static_cast<int>(machines_.nodes.size())},
              job.dtype, job.op);
  if (job.one_shot) return;
  // A machine sends its result only once it has what this one sent it: so these places are free.
  for (int node = 0; node < job.nodes; ++node) {
    if (node == node_) continue;
    const Part theirs = parts[node];
    between_->receive(node, lane.slice + theirs.begin * job.size(), theirs.count * job.size(), lane.receives);
    between_->send(node, result, mine.count * job.size(), lane.sends);
  }
}

void HostCollectives::share_inside(const Job& job, std::size_t chunk) {
  Lane& lane = lane_of(chunk);
  if (owns_slice(job)) {
    between_->wait(lane.receives);
    between_->wait(lane.sends);
  }
  if (alone()) return;
  inside_.all_gather(
      {.input = lane.slice, .output = job.at(chunk), .counts = job.counts(chunk, inside_.size()), .dtype = job.dtype});
}

// ---- broadcast: inside root's machine, down a binomial tree of the machines' local ranks 0, inside the others

void HostCollectives::broadcast(const Collective& call) {
  const Job job(call, 1, machines_.count());
  const int root_node = machines_.nodes[static_cast<std::size_t>(call.root)];
  const bool at_root = node_ == root_node;
  if (owns_slice(job)) {
    begin_check(job);
    finish_check(job);
  }
  HostLink::Transfers sends;
  for (std::size_t chunk = 0; chunk < job.chunks; ++chunk) {
    if (at_root) broadcast_inside(job, chunk, machines_.local_rank(call.root));
    if (owns_slice(job)) pass_on(job, chunk, root_node, sends);
    if (!at_root) broadcast_inside(job, chunk, 0);
  }
  if (owns_slice(job)) between_->wait(sends);
}

void HostCollectives::broadcast_inside(const Job& job, std::size_t chunk, int root) {
  if (alone()) return;
  inside_.broadcast({.data = job.at(chunk), .count = job.elements(chunk), .dtype = job.dtype, .root = root});
}

void HostCollectives::pass_on(const Job& job, std::size_t chunk, int root_node, HostLink::Transfers& sends) {
  const int place = (node_ - root_node + job.nodes) % job.nodes;  // in the tree, whose root is 0
  const auto node_at = [&](int other) { return (other + root_node) % job.nodes; };
  const std::size_t bytes = job.elements(chunk) * job.size();
  int distance = 1;
  while (distance < job.nodes && (place & distance) == 0) distance *= 2;
  if (place != 0) {
    HostLink::Transfers receives;
    between_->receive(node_at(place - distance), job.at(chunk), bytes, receives);
    between_->wait(receives);
  }
  for (distance /= 2; distance > 0; distance /= 2)
    if (place + distance < job.nodes) between_->send(node_at(place + distance), job.at(chunk), bytes, sends);
}

}  // namespace lockstep
