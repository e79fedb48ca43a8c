// SPDX-License-Identifier: Apache-2.0
#include "lockstep/collective/world_state.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <climits>
#include <set>

#include "lockstep/base/text.h"
#include "lockstep/collective/c10d/c10d_transport.h"
#include "lockstep/error.h"

namespace lockstep {
namespace {

torch::Device device_of_rank(torch::DeviceType type, int local_rank) {
  if (type == torch::kCPU) return torch::kCPU;
  return {torch::kCUDA, static_cast<c10::DeviceIndex>(cuda_device_index(local_rank))};
}

std::string describe(const JobEnvironment& job) {
  std::array<char, HOST_NAME_MAX + 1> name{};
  ::gethostname(name.data(), name.size() - 1);
  return concat("rank ", job.rank, " of ", job.world_size, " on ", name.data());
}

}  // namespace

Transport& WorldState::transport_for(const TensorCall& call) const {
  const torch::Tensor& tensor = call.output.defined() ? call.output : call.input;
  if (!tensor.defined() || tensor.is_cpu() || size() == 1) return *cpu_transport;
  if (cuda_transport) return *cuda_transport;
  throw DeviceError({.what = "a collective of a CUDA tensor between ranks that are threads",
                     .here = caller.here,
                     .next = "start the ranks as processes: `lockstep run` or --ranks"});
}

std::shared_ptr<WorldState> WorldState::sub_world(const std::vector<int>& ranks) const {
  auto state = std::make_shared<WorldState>();
  state->job = job;
  state->cores = cores;
  state->timeout = timeout;
  for (const int member : ranks) state->nodes.push_back(nodes[member]);
  const auto me = std::ranges::find(ranks, rank()) - ranks.begin();
  const int node = nodes[rank()];
  const std::set<int> used(state->nodes.begin(), state->nodes.end());
  state->job.rank = static_cast<int>(me);
  state->job.world_size = static_cast<int>(ranks.size());
  state->job.local_rank = static_cast<int>(std::count(state->nodes.begin(), state->nodes.begin() + me, node));
  state->job.local_size = static_cast<int>(std::ranges::count(state->nodes, node));
  state->job.node_rank = static_cast<int>(std::distance(used.begin(), used.find(node)));
  state->caller = {state->job.rank, state->job.world_size, caller.device, describe(state->job)};
  return state;
}

std::shared_ptr<WorldState> make_world_state(const JobEnvironment& job, const WorldOptions& options) {
  auto state = std::make_shared<WorldState>();
  state->job = job;
  state->timeout = options.timeout;
  state->caller = {job.rank, job.world_size, device_of_rank(options.device, job.local_rank), describe(job)};
  state->cores = cores_of(job, usable_cores());
  state->nodes.assign(job.world_size, 0);
  return state;
}

}  // namespace lockstep
