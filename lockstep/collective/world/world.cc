// SPDX-License-Identifier: Apache-2.0
#include "lockstep/world.h"

#include <set>

#include "lockstep/base/text.h"
#include "lockstep/collective/world/world_state.h"

namespace lockstep {

// ---- Work

struct Work::State {
  std::shared_ptr<WorldState> world;  // lives as long as what it has under way
  TensorCall call;
  FuturePtr future;
  TracedMessage traced;
  bool finished = false;

  void wait(std::optional<Deadline> deadline) {
    const int64_t began = trace::now_if_recording();
    future->wait(deadline);
    if (finished) return;
    call.finish();
    finished = true;
    if (call.operation == Operation::kReceive) traced.write(began, future->source());
  }
};

void Work::wait() { state_->wait({}); }
void Work::wait(Deadline deadline) { state_->wait(deadline); }

bool Work::done() { return state_->future->done(); }

const torch::Tensor& Work::result() const {
  if (state_->finished) return state_->call.result;
  throw UsageError({.what = "the result of a Work that was not waited for",
                    .here = state_->world->here,
                    .next = "call wait() first"});
}

int Work::source() const { return state_->future->source(); }

Work World::start(TensorCall call) const {
  call.begin();
  const int64_t began = trace::now_if_recording();
  TracedMessage traced(state_->messages, call);
  FuturePtr future = state_->transport_for(call).start(call);
  if (call.operation == Operation::kSend) traced.write(began, call.peer);
  return Work(OwnedHere<Work::State>(new Work::State{state_, std::move(call), std::move(future), std::move(traced)}));
}

// ---- Who is where

int World::rank() const { return state_->rank(); }
int World::size() const { return state_->size(); }
int World::local_rank() const { return state_->job.local_rank; }
int World::local_size() const { return state_->job.local_size; }
int World::node_rank() const { return state_->job.node_rank; }
torch::Device World::device() const { return state_->device; }
const CoreSet& World::cores() const { return state_->cores; }
std::string World::describe() const { return state_->here; }
milliseconds World::timeout() const { return state_->timeout; }

// ---- Sub-worlds

namespace {

using RankList = std::vector<int>;

void check_list(const World& world, const RankList& ranks) {
  const bool unknown = std::ranges::any_of(ranks, [&](int rank) { return rank < 0 || rank >= world.size(); });
  if (!unknown && std::set<int>(ranks.begin(), ranks.end()).size() == ranks.size()) return;
  throw UsageError({.what = concat("a sub-world that names a rank twice, or one that is not among the ", world.size()),
                    .here = world.describe(),
                    .next = "name ranks of this world, each once"});
}

// The lists of all ranks; a row ends at -1.
IntVector<RankList> exchange_lists(const World& world, const RankList& ranks) {
  torch::Tensor mine = torch::full({world.size() + 1}, -1, torch::kInt32);
  std::copy(ranks.begin(), ranks.end(), mine.mutable_data_ptr<int32_t>());
  const torch::Tensor all = world.all_gather(mine);
  IntVector<RankList> lists;
  for (const torch::Tensor& row : all.unbind()) {
    const auto* const first = row.const_data_ptr<int32_t>();
    lists.emplace_back(first, std::find(first, first + world.size(), -1));
  }
  return lists;
}

std::string text_of(const RankList& ranks) { return ranks.empty() ? "no ranks" : "ranks " + join(ranks, ", "); }

// This rank's list, or an empty one for a rank that is not in its own, once it is known that no two lists contradict
// each other.
RankList agree_on_list(const World& world, const RankList& ranks) {
  const bool is_member = std::ranges::find(ranks, world.rank()) != ranks.end();
  const IntVector<RankList> lists = exchange_lists(world, is_member ? ranks : RankList());
  for (int rank = 0; rank < world.size(); ++rank)
    for (const int member : lists[rank])
      if (lists[member] != lists[rank])
        throw MismatchError({.what = concat("rank ", rank, " wants a sub-world of ", text_of(lists[rank]), ", rank ",
                                            member, " one of ", text_of(lists[member])),
                             .here = world.describe(),
                             .likely = "ranks that compute their groups from different numbers",
                             .next = "give the same list on all its ranks; other lists may not overlap it"});
  return lists[world.rank()];
}

}  // namespace

std::optional<World> World::sub_world(const RankList& ranks, std::optional<milliseconds> separate) const {
  check_list(*this, ranks);
  state_->count_sub_world();
  const RankList agreed = agree_on_list(*this, ranks);
  auto cpu_transport = state_->cpu_transport->group(agreed, separate);
  const bool with_gpus = state_->cuda_transport && !separate;
  auto cuda_transport = with_gpus ? state_->cuda_transport->group(agreed, {}) : nullptr;
  if (!cpu_transport) return std::nullopt;
  auto state = state_->sub_world(ranks, std::move(cpu_transport));
  state->cuda_transport = std::move(cuda_transport);
  state->timeout = separate.value_or(state_->timeout);
  return WorldState::world_of(std::move(state));
}

std::optional<World> World::group(const RankList& ranks) const { return sub_world(ranks, {}); }

std::optional<World> World::separate(const RankList& ranks, milliseconds timeout) const {
  return sub_world(ranks, timeout.count() > 0 ? timeout : state_->timeout);
}

void World::abandon(const std::string& reason) const { state_->abandon(reason); }

std::optional<World> World::split(int color, int key) const {
  const torch::Tensor all = all_gather(torch::tensor({color, key}, torch::kInt32));
  const auto* const pairs = all.const_data_ptr<int32_t>();
  const auto color_of = [pairs](int rank) { return pairs[2 * rank]; };
  const auto key_of = [pairs](int rank) { return pairs[2 * rank + 1]; };
  RankList ranks;
  for (int rank = 0; rank < size(); ++rank)
    if (color >= 0 && color_of(rank) == color) ranks.push_back(rank);
  std::ranges::stable_sort(ranks, {}, key_of);
  return group(ranks);
}

// ---- Others

torch::Tensor World::allocate(torch::IntArrayRef sizes, const torch::TensorOptions& options) const {
  if (!options.device().is_cpu()) return torch::empty(sizes, options);
  return state_->cpu_transport->allocate(sizes, options);
}

std::shared_ptr<shm::Group> World::machine_group() const {
  if (size() == 1 || !device().is_cpu()) return nullptr;
  return state_->cpu_transport->machine_group();
}

}  // namespace lockstep
