#include "lockstep/collective/machines/machine_collectives.h"

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

constexpr std::size_t kOneShotBytes = 16384;
constexpr int kAllNodes = -1;

// Every machine but the last passes a piece on, and each waits for it once: so smaller pieces than a reduction's.
std::size_t piece_bytes(std::size_t bytes) {
  return std::clamp(bytes / 32, std::size_t{256} << 10, std::size_t{1} << 20) / kCacheLine * kCacheLine;
}

}  // namespace

// Where a broadcast comes from and goes to.
struct HostCollectives::Route {
  int from = -1;  // none
  std::vector<int> to{};

  static Route chain(int place, int places);
  static Route tree(int place, int places);
};

// K/B and a piece more per machine. Of `places` machines root's has place 0.
HostCollectives::Route HostCollectives::Route::chain(int place, int places) {
  Route route{.from = place - 1};
  if (place + 1 < places) route.to.push_back(place + 1);
  return route;
}

// A binomial tree: the fewest steps, for what goes in one piece.
HostCollectives::Route HostCollectives::Route::tree(int place, int places) {
  Route route;
  int distance = 1;
  while (distance < places && (place & distance) == 0) distance *= 2;
  if (place != 0) route.from = place - distance;
  for (distance /= 2; distance > 0; distance /= 2)
    if (place + distance < places) route.to.push_back(place + distance);
  return route;
}

// One call, cut up. `data` is the tensor of a rank that gets no result, too: then it is a copy.
struct HostCollectives::Job {
  Job(const Collective& call, const Machines& machines, int slices_of_chunk)
      : wish(wish_of(call, static_cast<std::size_t>(call.output.numel()))),
        data(static_cast<std::byte*>(call.output.mutable_data_ptr())),
        count(static_cast<std::size_t>(call.output.numel())),
        dtype(*to_dtype(call.output.scalar_type())),
        op(call.op),
        root_node(machines.node_of(call.root)),
        around(call.algorithm == Algorithm::kRing),
        nodes(machines.count()),
        whole(!around && (nodes == 2 || count * size() <= kOneShotBytes)),
        slices(slices_for(count * size(), slices_of_chunk)),
        result_node(call.operation == Operation::kReduce ? root_node : kAllNodes) {
    cut(around ? std::max(count * size(), kCacheLine) : chunk_bytes(count * size()));
  }

  void cut(std::size_t bytes_of_chunk) {
    chunk_count = bytes_of_chunk / size();
    chunks = std::max<std::size_t>(1, (count + chunk_count - 1) / chunk_count);
  }

  std::size_t size() const { return size_of(dtype); }
  std::size_t begin(std::size_t chunk) const { return chunk * chunk_count; }
  std::size_t elements(std::size_t chunk) const { return std::min(chunk_count, count - begin(chunk)); }
  std::byte* at(std::size_t chunk) const { return data + begin(chunk) * size(); }
  Partition cut_chunk(std::size_t chunk) const { return Partition::even(elements(chunk), slices, kCacheLine / size()); }
  Part slice(std::size_t chunk, int local_rank) const { return cut_chunk(chunk)[local_rank]; }
  Partition cut_slice(std::size_t slice_count) const { return Partition::even(slice_count, nodes, kCacheLine / size()); }

  // What shared memory is told: a part for each local rank, empty for those that own no slice.
  std::vector<std::size_t> counts(std::size_t chunk, int local_size) const {
    std::vector<std::size_t> all;
    for (int rank = 0; rank < local_size; ++rank) all.push_back(rank < slices ? slice(chunk, rank).count : 0);
    return all;
  }

  int wrapped(int node) const { return (node + nodes) % nodes; }
  bool wanted_by(int node) const { return result_node == kAllNodes || result_node == node; }

  Wish wish;
  std::byte* data;
  std::size_t count;
  DType dtype;
  ReduceOp op;
  int root_node;
  bool around;  // the ring of machines
  int nodes;
  bool whole;  // slices are sent whole, in one round, and every machine reduces for itself
  int slices;
  int result_node;  // kAllNodes, or the only machine that wants the result
  std::size_t chunk_count = 0;
  std::size_t chunks = 0;
};

// A chunk's memory and transfers. `slice` is the owner's slice: the tensor's own memory where a machine has one rank.
struct HostCollectives::Lane {
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
  check_.give_up();
  arriving_.clear();
  leaving_.clear();
  for (const auto& lane : lanes_) {
    lane->receives.clear();
    lane->sends.clear();
  }
}

bool HostCollectives::owns_slice(const Job& job) const { return inside_.rank() < job.slices; }

// ---- all_reduce and reduce

void HostCollectives::all_reduce(const Collective& call) {
  const Job job(call, machines_, machines_.slices());
  if (job.around)
    reduce_around(job);
  else
    reduce_in_chunks(job);
}

// As all_reduce, but the result goes to one machine.
void HostCollectives::reduce(const Collective& call) { reduce_in_chunks(Job(call, machines_, machines_.slices())); }

void HostCollectives::reduce_in_chunks(const Job& job) {
  if (owns_slice(job)) check_.begin(*between_, job.wish);
  for (std::size_t step = 0; step < job.chunks + 2; ++step) {
    if (step < job.chunks) reduce_inside(job, step);
    if (step < job.chunks) send_parts(job, step);
    if (step == 0 && owns_slice(job)) check_.finish(*between_);
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
  lane.slice = grown(inside_, lane.slice_memory, mine * job.size());
  run_inside(
      inside_, job.wish, chunk,
      Call{.operation = Operation::kReduceScatter, 
          .input = job.at(chunk), .output = lane.slice, .counts = counts, .dtype = job.dtype, .op = op_inside(job.op)});
}

void HostCollectives::send_parts(const Job& job, std::size_t chunk) {
  if (!owns_slice(job)) return;
  Lane& lane = lane_of(chunk);
  const std::size_t slice_count = job.slice(chunk, inside_.rank()).count;
  const Partition parts = job.cut_slice(slice_count);
  const auto part_for = [&](int node) { return job.whole ? Part{0, slice_count} : parts[node]; };
  const std::size_t mine = part_for(node_).count * job.size();
  std::byte* const room = grown(inside_, lane.received_memory, mine * static_cast<std::size_t>(job.nodes));
  lane.received.assign(static_cast<std::size_t>(job.nodes), nullptr);
  for (const int node : between_->others()) {
    std::byte*& received = lane.received[static_cast<std::size_t>(node)];
    received = room + mine * static_cast<std::size_t>(node);
    const Part theirs = part_for(node);
    between_->receive(node, received, mine, lane.receives);
    between_->send(node, lane.slice + theirs.begin * job.size(), theirs.count * job.size(), lane.sends);
  }
}

void HostCollectives::reduce_between(const Job& job, std::size_t chunk) {
  if (!owns_slice(job)) return;
  Lane& lane = lane_of(chunk);
  between_->wait(lane.receives);
  if (job.whole) between_->wait(lane.sends);  // the slice is about to change
  const std::size_t slice_count = job.slice(chunk, inside_.rank()).count;
  const Partition parts = job.cut_slice(slice_count);
  const Part mine = job.whole ? Part{0, slice_count} : parts[node_];
  std::byte* const result = lane.slice + mine.begin * job.size();
  std::vector<const std::byte*> sources(lane.received.begin(), lane.received.end());
  sources[static_cast<std::size_t>(node_)] = result;
  shm::reduce(
      {.sources = sources, .destinations = std::span(&result, 1), .count = mine.count, .divisor = machines_.ranks()},
      job.dtype, job.op);
  if (job.whole) return;
  // A machine sends its result only once it has what this one sent it: so these places are free.
  for (const int node : between_->others()) {
    const Part theirs = parts[node];
    std::byte* const place = lane.slice + theirs.begin * job.size();
    if (job.wanted_by(node_)) between_->receive(node, place, theirs.count * job.size(), lane.receives);
    if (job.wanted_by(node)) between_->send(node, result, mine.count * job.size(), lane.sends);
  }
}

void HostCollectives::share_inside(const Job& job, std::size_t chunk) {
  Lane& lane = lane_of(chunk);
  if (owns_slice(job)) {
    between_->wait(lane.receives);
    between_->wait(lane.sends);
  }
  if (alone() || !job.wanted_by(node_)) return;
  inside_.all_gather(
      {.input = lane.slice, .output = job.at(chunk), .counts = job.counts(chunk, inside_.size()), .dtype = job.dtype});
}

// ---- all_reduce around the ring of machines (S1)

void HostCollectives::reduce_around(const Job& job) {
  if (owns_slice(job)) check_.begin(*between_, job.wish);
  reduce_inside(job, 0);
  if (owns_slice(job)) {
    check_.finish(*between_);
    scatter_around(job, lane_of(0).slice);
    gather_around(job, lane_of(0).slice);
  }
  share_inside(job, 0);
}

// In step k the part that this machine got in step k - 1, with its own added, goes on to the next one.
void HostCollectives::scatter_around(const Job& job, std::byte* slice) {
  Lane& lane = lane_of(0);
  const Partition parts = job.cut_slice(job.slice(0, inside_.rank()).count);
  std::byte* const received = grown(inside_, lane.received_memory, parts.longest() * job.size());
  for (int step = 0; step < job.nodes - 1; ++step) {
    const Part out = parts[job.wrapped(node_ - step)];
    const Part in = parts[job.wrapped(node_ - step - 1)];
    between_->receive(job.wrapped(node_ - 1), received, in.count * job.size(), lane.receives);
    between_->send(job.wrapped(node_ + 1), slice + out.begin * job.size(), out.count * job.size(), lane.sends);
    between_->wait(lane.receives);
    between_->wait(lane.sends);
    std::byte* const own = slice + in.begin * job.size();
    const std::array<const std::byte*, 2> sources{received, own};
    const bool last = step == job.nodes - 2;
    shm::reduce(
        {.sources = sources, .destinations = std::span(&own, 1), .count = in.count, .divisor = machines_.ranks()},
        job.dtype, last ? job.op : op_inside(job.op));
  }
}

void HostCollectives::gather_around(const Job& job, std::byte* slice) {
  Lane& lane = lane_of(0);
  const Partition parts = job.cut_slice(job.slice(0, inside_.rank()).count);
  for (int step = 0; step < job.nodes - 1; ++step) {
    const Part out = parts[job.wrapped(node_ + 1 - step)];
    const Part in = parts[job.wrapped(node_ - step)];
    between_->receive(job.wrapped(node_ - 1), slice + in.begin * job.size(), in.count * job.size(), lane.receives);
    between_->send(job.wrapped(node_ + 1), slice + out.begin * job.size(), out.count * job.size(), lane.sends);
    between_->wait(lane.receives);
    between_->wait(lane.sends);
  }
}

// ---- broadcast

void HostCollectives::broadcast(const Collective& call) {
  Job job(call, machines_, 1);
  job.cut(piece_bytes(job.count * job.size()));
  const bool at_root = node_ == job.root_node;
  if (owns_slice(job)) {
    check_.begin(*between_, job.wish);
    receive_all(job);
  }
  for (std::size_t chunk = 0; chunk < job.chunks; ++chunk) {
    if (at_root) broadcast_inside(job, chunk, machines_.local_rank(call.root));
    if (owns_slice(job)) pass_on(job, chunk);
    if (!at_root) broadcast_inside(job, chunk, 0);
  }
  if (!owns_slice(job)) return;
  check_.finish(*between_);
  between_->wait(leaving_);
}

void HostCollectives::broadcast_inside(const Job& job, std::size_t chunk, int root) {
  if (alone()) return;
  run_inside(inside_, job.wish, chunk,
             Call{.operation = Operation::kBroadcast, .output = job.at(chunk), .count = job.elements(chunk), .dtype = job.dtype, .root = root});
}

HostCollectives::Route HostCollectives::route_of(const Job& job) const {
  const int place = (node_ - job.root_node + job.nodes) % job.nodes;
  Route route = job.chunks > 1 ? Route::chain(place, job.nodes) : Route::tree(place, job.nodes);
  const auto node_at = [&](int other) { return (other + job.root_node) % job.nodes; };
  if (route.from >= 0) route.from = node_at(route.from);
  for (int& other : route.to) other = node_at(other);
  return route;
}

// All at once: a machine then never waits for the one after it.
void HostCollectives::receive_all(const Job& job) {
  arriving_.assign(job.chunks, {});
  const int from = route_of(job).from;
  if (from < 0) return;
  for (std::size_t chunk = 0; chunk < job.chunks; ++chunk)
    between_->receive(from, job.at(chunk), job.elements(chunk) * job.size(), arriving_[chunk]);
}

// Before data can be waited for, it must be known that it will come.
void HostCollectives::pass_on(const Job& job, std::size_t chunk) {
  const Route route = route_of(job);
  if (chunk == 0 && route.from >= 0) check_.compare(*between_, route.from);
  between_->wait(arriving_[chunk]);
  for (const int node : route.to) between_->send(node, job.at(chunk), job.elements(chunk) * job.size(), leaving_);
}

}  // namespace lockstep
