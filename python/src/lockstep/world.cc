// SPDX-License-Identifier: Apache-2.0
#include "lockstep/world.h"

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "bindings.h"
#include "lockstep/collective/c10d/backend.h"
#include "lockstep/collective/calls/collective_names.h"
#include "lockstep/collective/meet/rendezvous.h"
#include "lockstep/collective/world/world_state.h"
#include "lockstep/sync_batch_norm.h"
#include "lockstep/timeline.h"

namespace lockstep::python {
namespace {

using StorePtr = c10::intrusive_ptr<c10d::Store>;

using Timeout = std::optional<std::chrono::milliseconds>;

WorldOptions options_for(const torch::Device& device, Timeout timeout = {}) {
  WorldOptions options{.device = device.type()};
  if (timeout) options.timeout = *timeout;
  return options;
}

// The timeout of a process group; none where it has no backend for the device, or one that does not say.
Timeout timeout_of(c10d::ProcessGroup& group, const torch::Device& device) {
  try {
    return group.getBackend(device.type())->getBackendOptions()->timeout;
  } catch (const std::exception&) {
    return {};
  }
}

// Blocks until all ranks are connected. Has torch's own return type: Python sees it as a torch.distributed Backend.
c10::intrusive_ptr<c10d::Backend> create_backend(const StorePtr& store, int rank, int size,
                                                 std::chrono::milliseconds timeout) {
  return make_c10d_backend(store, rank, size, timeout);
}

// The store at which the ranks of a launcher meet, this rank, and how many there are. Blocks until rank 0 answers; rank 0 until
// all have come.
std::tuple<StorePtr, int, int> meet_launched_ranks(std::chrono::milliseconds timeout) {
  const JobEnvironment job = read_job_environment();
  return {connect_process_group(job, timeout), job.rank, job.world_size};
}

// Calls that block. Undefined tensors are None in Python.
void bind_collectives(py::class_<World>& world) {
  const auto def = [&world](const char* name, auto call) { world.def(name, call, Release()); };
  def("group", &World::group);
  def("split", &World::split);
  def("barrier", &World::barrier);
  def("all_reduce", [](const World& all, const Tensor& tensor, const std::string& op) {
    all.all_reduce(tensor, value_named<ReduceOp>(op, "op"));
  });
  def("reduce", [](const World& all, const Tensor& tensor, int root, const std::string& op) {
    all.reduce(tensor, {.op = value_named<ReduceOp>(op, "op"), .root = root});
  });
  def("broadcast", &World::broadcast);
  def("all_gather", [](const World& all, const Tensor& tensor) { return all.all_gather(tensor); });
  def("gather", &World::gather);
  def("scatter", [](const World& all, const std::optional<Tensor>& parts, const Tensor& output, int root) {
    all.scatter(parts.value_or(Tensor()), output, root);
  });
  def("reduce_scatter", [](const World& all, const Tensor& tensor, const std::string& op) {
    return all.reduce_scatter(tensor, {.op = value_named<ReduceOp>(op, "op")});
  });
  def("all_to_all", [](const World& all, const Tensor& tensor, const std::vector<int64_t>& send_rows) {
    return all.all_to_all(tensor, {.send_rows = send_rows});
  });
  def("send", &World::send);
  def("receive", [](const World& all, const Tensor& tensor, std::optional<int> from, int tag) {
    return all.receive(tensor, {.from = from.value_or(kAnyRank), .tag = tag});
  });
  def("copy", [](const World& all) { return *all.split(0); });
}

}  // namespace

void bind_world(py::module_& module) {
  py::class_<World> world(module, "World");
  bind_collectives(world);
  world.def_static("single", [] { return World::single(); })
      .def_static(
          "from_env", [](const torch::Device& device) { return World::from_env(options_for(device)); }, Release())
      .def_static(
          "over_store",
          [](const StorePtr& store, int rank, int size, const torch::Device& device, Timeout timeout) {
            return WorldState::over_store(store, rank, size, options_for(device, timeout));
          },
          Release())
      .def_property_readonly("rank", &World::rank)
      .def_property_readonly("size", &World::size)
      .def_property_readonly("local_rank", &World::local_rank)
      .def_property_readonly("local_size", &World::local_size)
      .def_property_readonly("node_rank", &World::node_rank)
      .def("describe", &World::describe);
  py::class_<Timeline>(module, "Timeline")
      .def(py::init([](const World& world, const std::string& file, int64_t first, int64_t end) {
             return std::make_unique<Timeline>(world, file, StepRange{first, end});
           }),
           Release())
      .def("begin_step", &Timeline::begin_step)
      .def(
          "finish", [](Timeline& timeline) { timeline.finish(); }, Release());
  module.def("create_backend", &create_backend, Release());
  module.def("meet_launched_ranks", &meet_launched_ranks, Release());
  module.def("timeout_of", &timeout_of);
  module.def(
      "normalise_over_ranks",
      [](const World& world, const torch::Tensor& input, double eps) {
        return normalise_over_ranks(world, input, eps, &loss_weight);
      },
      Release());
}

}  // namespace lockstep::python
