// SPDX-License-Identifier: Apache-2.0
#include "lockstep/collective/world/world_state.h"

#include <set>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "agent/meet/job_secret.h"
#include "agent/recover/job_memory.h"
#include "lockstep/base/log.h"
#include "lockstep/base/process/host_name.h"
#include "lockstep/base/text.h"
#include "lockstep/collective/gpus.h"
#include "lockstep/collective/meet/connecting_store.h"
#include "lockstep/collective/meet/rendezvous.h"
#include "lockstep/collective/trace_if_asked.h"
#include "lockstep/collective/transport/connect.h"
#include "lockstep/observe/phase_scope.h"

namespace lockstep {
namespace {

torch::Device device_of_rank(torch::Device device, int local_rank) {
  if (device.is_cpu()) return torch::kCPU;
  if (device.has_index()) {
    require_gpus(device.index());
    return device;
  }
  return {torch::kCUDA, static_cast<c10::DeviceIndex>(cuda_device_index(local_rank))};
}

std::string describe(const JobEnvironment& job) {
  return concat("rank ", job.rank, " of ", job.world_size, " on ", host_name());
}

void require_trust_for_nccl(const WorldState& state) {
  if (std::ranges::max(state.nodes) == 0 || network_is_insecure()) return;
  throw EnvironmentError({.what = "CUDA tensors would cross the network between machines in the clear",
                          .here = state.here,
                          .likely = "NCCL, which carries them, neither encrypts nor authenticates",
                          .next = "in a network that you trust: --insecure-network, or LOCKSTEP_INSECURE_NETWORK=1 for "
                                  "all ranks; else keep the ranks on one machine"});
}

void connect(WorldState& state, const StorePtr& store) {
  const TransportOptions options{
      .rank = state.rank(), .size = state.size(), .describe = state.here, .timeout = state.timeout};
  auto [transport, machine_of] = connect_cpu_ranks(store, this_machine(), options);
  state.nodes = std::move(machine_of);
  state.cpu_transport = std::move(transport);
  if (state.device.is_cuda()) {
    require_trust_for_nccl(state);
    state.cuda_transport = make_nccl(c10::make_intrusive<ConnectingStore>(store, state.rank()), options);
  }
  let_nobody_else_in(*store);
}

}  // namespace

Transport& WorldState::transport_for(const TensorCall& call) const {
  const torch::Tensor& tensor = call.output_tensor.defined() ? call.output_tensor : call.input_tensor;
  if (size() > 1 && !cpu_transport.get_deleter().process.is_here()) refuse_forked_child(here);
  if (!tensor.defined() || tensor.is_cpu() || size() == 1) return *cpu_transport;
  if (cuda_transport) return *cuda_transport;
  throw DeviceError({.what = "a collective of a CUDA tensor between ranks that are threads",
                     .here = here,
                     .next = "start the ranks as processes: `lockstep run` or --ranks"});
}

JobEnvironment job_of_rank(JobEnvironment job, int rank, const IntVector<int>& nodes) {
  const int node = nodes[rank];
  const std::set<int> used(nodes.begin(), nodes.end());
  job.rank = rank;
  job.world_size = nodes.size();
  job.local_rank = to_int(std::count(nodes.begin(), nodes.begin() + rank, node));
  job.local_size = to_int(std::ranges::count(nodes, node));
  job.node_rank = to_int(std::distance(used.begin(), used.find(node)));
  return job;
}

std::shared_ptr<WorldState> WorldState::sub_world(const std::vector<int>& ranks,
                                                  std::unique_ptr<Transport> transport) const {
  auto state = std::make_shared<WorldState>();
  state->cpu_transport = std::move(transport);
  state->cores = cores;
  state->serves = serves;
  for (const int member : ranks) state->nodes.push_back(nodes[member]);
  state->messages->id = mix_numbers(messages->id, sub_worlds_);
  for (const int member : ranks) {
    state->messages->in_job.push_back(messages->in_job[member]);
    state->messages->id = mix_numbers(state->messages->id, member);
  }
  state->messages->rank = index_of(ranks, rank());
  state->job = job_of_rank(job, state->messages->rank, state->nodes);
  state->device = device;
  state->here = describe(state->job);
  return state;
}

std::shared_ptr<WorldState> make_world_state(const JobEnvironment& job, const WorldOptions& options) {
  auto state = std::make_shared<WorldState>();
  state->job = job;
  state->serves = job.serves();
  state->timeout = std::min(options.timeout, Deadline::kLongest);
  state->device = device_of_rank(options.device, job.local_rank);
  state->here = describe(job);
  state->cores = cores_of(job, usable_cores());
  state->nodes.assign(job.world_size, 0);
  state->messages->rank = job.rank;
  for (int rank = 0; rank < job.world_size; ++rank) state->messages->in_job.push_back(rank);
  if (job.world_size == 1) state->cpu_transport = make_self();
  return state;
}

World WorldState::world_of(std::shared_ptr<WorldState> state) {
  state->stoppable_.emplace([all = state.get()](const std::string& reason) { all->abandon(reason); });
  return World(std::move(state));
}

void WorldState::abandon(const std::string& reason) const {
  if (cpu_transport.get_deleter().process.is_here()) cpu_transport->fail(reason);
}

World World::from_env(const WorldOptions& options) {
  World world = WorldState::from_env(options);
  trace_if_asked(world);
  return world;
}

World WorldState::from_env(const WorldOptions& options) {
  fault::read_plan();
  const JobEnvironment job = read_job_environment();
  auto state = make_world_state(job, options);
  set_log_rank(job.rank, job.world_size);
  observe::meets({job.rank, job.world_size, job.job_id, job.node_rank});
  const PhaseScope meeting(Phase::kMeeting);
  if (job.world_size > 1) connect(*state, connect_store(state->job, state->timeout));
  if (JobMemory* const memory = JobMemory::get()) memory->met();
  return world_of(std::move(state));
}

World WorldState::over_store(const StorePtr& store, int rank, int size, const WorldOptions& options) {
  JobEnvironment job = job_environment_or_none();
  job.rank = rank;
  job.world_size = size;
  auto state = make_world_state(job, options);
  if (size > 1) {
    const PhaseScope meeting(Phase::kMeeting);
    connect(*state, store);
    state->job = job_of_rank(state->job, rank, state->nodes);
    state->device = device_of_rank(options.device, state->job.local_rank);
    state->cores = cores_of(state->job, usable_cores());
  }
  World world = world_of(std::move(state));
  trace_if_asked(world);
  return world;
}

int WorldState::run(const TensorCall& call) {
  call.begin();
  const int64_t began = trace::now_if_recording();
  std::optional<TracedMessage> traced;
  if (is_message(call.operation)) traced.emplace(messages, call);
  const int source = transport_for(call).run(call);
  if (traced) traced->write(began, source);
  call.finish();
  return source;
}

World World::single(const WorldOptions& options) { return WorldState::world_of(make_world_state({}, options)); }

// First the lengths, then all texts at the length of the longest: tensors of the same shape on every rank.
std::vector<std::string> World::exchange_texts(const std::string& mine) const {
  const torch::Tensor lengths = all_gather(torch::tensor({to_int64(mine.size())}));
  const torch::Tensor padded = torch::zeros({lengths.max().item<int64_t>()}, torch::kUInt8);
  std::copy(mine.begin(), mine.end(), padded.mutable_data_ptr<uint8_t>());
  const torch::Tensor all = all_gather(padded);
  std::vector<std::string> texts;
  for (int rank = 0; rank < size(); ++rank) {
    const auto* text = all[rank].const_data_ptr<uint8_t>();
    texts.emplace_back(text, text + lengths[rank].item<int64_t>());
  }
  return texts;
}

}  // namespace lockstep
