// SPDX-License-Identifier: Apache-2.0
#include "lockstep/world.h"

#include <algorithm>
#include <exception>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "lockstep/base/file.h"
#include "lockstep/base/log.h"
#include "lockstep/base/text.h"
#include "lockstep/collective/c10d/c10d_transport.h"
#include "lockstep/collective/machines/hierarchy.h"
#include "lockstep/collective/rendezvous.h"
#include "lockstep/collective/self_transport.h"
#include "lockstep/collective/shared_memory_transport.h"
#include "lockstep/collective/world_state.h"
#include "lockstep/error.h"
#include "lockstep/launch/environment.h"

namespace lockstep {
namespace {

TransportOptions transport_options(const WorldState& state) {
  return {.rank = state.rank(),
          .size = state.size(),
          .describe = state.caller.here,
          .address = address_towards(state.job),
          .timeout = state.timeout};
}

// The same on two ranks if they can share memory: one running kernel, and one machine to the launcher.
std::string machine_id(const JobEnvironment& job) {
  return concat(read_file("/proc/sys/kernel/random/boot_id"), job.node_rank);
}

std::vector<int> number_by_first_appearance(const std::vector<std::string>& names) {
  std::vector<std::string> known;
  std::vector<int> numbers;
  for (const std::string& name : names) {
    const auto place = std::find(known.begin(), known.end(), name);
    numbers.push_back(static_cast<int>(place - known.begin()));
    if (place == known.end()) known.push_back(name);
  }
  return numbers;
}

void connect(const std::shared_ptr<WorldState>& state) {
  const World world = WorldState::world_of(state);
  state->store = connect_store(state->job, state->timeout);
  const TransportOptions options = transport_options(*state);
  state->nodes = number_by_first_appearance(world.exchange_texts("the machines", machine_id(state->job)));
  const Topology topology{state->nodes};
  const auto here = topology.ranks_on(state->nodes[state->rank()]);
  auto inside = connect_shared_memory(world, here, options);
  if (topology.machines() == 1)
    state->cpu_transport = make_shared_memory(std::move(inside));
  else
    state->cpu_transport = std::make_unique<Hierarchy>(std::move(inside), topology, state->store, options);
  if (state->caller.device.is_cuda()) state->cuda_transport = make_nccl(state->store, options);
}

std::string missing_ranks(c10d::Store& store, const std::vector<std::string>& keys) try {
  std::vector<std::string> missing;
  for (std::size_t rank = 0; rank < keys.size(); ++rank)
    if (!store.check({keys[rank]})) missing.push_back(std::to_string(rank));
  return join(missing, ", ");
} catch (const std::exception&) {
  return "0, which keeps the store";
}

RendezvousError no_word(const WorldState& state, const std::vector<std::string>& keys, const std::string& topic) {
  return RendezvousError({.what = concat("no word from rank ", missing_ranks(*state.store, keys), " about ", topic),
                          .here = state.caller.here,
                          .likely = "that rank died, or does not make the same calls in the same order",
                          .next = "look at its output"});
}

std::vector<std::string> exchange_through_store(WorldState& state, const std::string& topic, const std::string& mine) {
  const int round = state.exchanges++;
  std::vector<std::string> keys;
  for (int i = 0; i < state.size(); ++i) keys.push_back(concat("text/", round, "/", i));
  std::vector<std::string> texts;
  try {
    state.store->set(keys[static_cast<unsigned>(state.rank())], std::vector<std::uint8_t>(mine.begin(), mine.end()));
    state.store->wait(keys, state.timeout);
    for (const auto& bytes : state.store->multiGet(keys)) texts.emplace_back(bytes.begin(), bytes.end());
  } catch (const std::exception&) {
    throw no_word(state, keys, topic);
  }
  return texts;
}

// First the lengths, then all texts at the length of the longest: tensors of the same shape on every rank.
std::vector<std::string> exchange_as_tensors(const World& world, const std::string& mine) {
  const torch::Tensor lengths = world.all_gather(torch::tensor({static_cast<std::int64_t>(mine.size())}));
  const torch::Tensor padded = torch::zeros({lengths.max().item<std::int64_t>()}, torch::kUInt8);
  std::copy(mine.begin(), mine.end(), padded.mutable_data_ptr<std::uint8_t>());
  const torch::Tensor all = world.all_gather(padded);
  std::vector<std::string> texts;
  for (int rank = 0; rank < world.size(); ++rank) {
    const auto* text = all[rank].const_data_ptr<std::uint8_t>();
    texts.emplace_back(text, text + lengths[rank].item<std::int64_t>());
  }
  return texts;
}

}  // namespace

World World::from_env(const WorldOptions& options) {
  const JobEnvironment job = read_job_environment();
  auto state = make_world_state(job, options);
  set_log_rank(job.rank, job.world_size);
  if (job.world_size > 1)
    connect(state);
  else
    state->cpu_transport = make_self();
  return World(std::move(state));
}

World World::single(const WorldOptions& options) {
  auto state = make_world_state(JobEnvironment{}, options);
  state->cpu_transport = make_self();
  return World(std::move(state));
}

std::vector<std::string> World::exchange_texts(const std::string& topic, const std::string& mine) const {
  if (size() == 1) return {mine};
  return state_->cpu_transport ? exchange_as_tensors(*this, mine) : exchange_through_store(*state_, topic, mine);
}

}  // namespace lockstep
