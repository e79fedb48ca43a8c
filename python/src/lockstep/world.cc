// SPDX-License-Identifier: Apache-2.0
#include "lockstep/world.h"

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "bindings.h"
#include "lockstep/collective/c10d/backend.h"
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
  return c10::make_intrusive<C10dBackend>(store, rank, size, timeout);
}

// The store at which the ranks of a launcher meet, this rank, and how many there are. Blocks until rank 0 answers; rank 0 until
// all have come.
std::tuple<StorePtr, int, int> meet_launched_ranks(std::chrono::milliseconds timeout) {
  const JobEnvironment job = read_job_environment();
  return {connect_process_group(job, timeout), job.rank, job.world_size};
}

}  // namespace

void bind_world(py::module_& module) {
  py::class_<World>(module, "World")
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
      .def("barrier", &World::barrier, Release())
      .def(
          "copy", [](const World& world) { return *world.split(0); }, Release());
  py::class_<Timeline>(module, "Timeline")
      .def(py::init([](const World& world, const std::string& file, std::int64_t first, std::int64_t end) {
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
