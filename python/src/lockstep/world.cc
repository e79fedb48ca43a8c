// SPDX-License-Identifier: Apache-2.0
#include "lockstep/world.h"

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <pybind11/chrono.h>
#include <pybind11/stl.h>

#include "bindings.h"
#include "lockstep/collective/world/world_state.h"
#include "lockstep/sync_batch_norm.h"
#include "lockstep/timeline.h"
#include "replica.h"

namespace py = pybind11;

namespace lockstep::python {
namespace {

using StorePtr = c10::intrusive_ptr<c10d::Store>;
using Release = py::call_guard<py::gil_scoped_release>;

using Timeout = std::optional<std::chrono::milliseconds>;

WorldOptions options_for(const torch::Device& device, Timeout timeout = {}) {
  WorldOptions options{.device = device.type()};
  if (timeout) options.timeout = *timeout;
  return options;
}

// None where the group has no backend for the device, or one that does not say.
Timeout timeout_of(c10d::ProcessGroup& group, const torch::Device& device) {
  try {
    return group.getBackend(device.type())->getBackendOptions()->timeout;
  } catch (const std::exception&) {
    return {};
  }
}

}  // namespace

void bind_world(py::module_& module) {
  py::class_<World>(module, "World", "The ranks of a job (lockstep/world.h).")
      .def_static(
          "from_env", [](const torch::Device& device) { return World::from_env(options_for(device)); }, Release(),
          py::arg("device"), "The world of the launcher's variables; none set: one rank. Blocks.")
      .def_static(
          "over_store",
          [](const StorePtr& store, int rank, int size, const torch::Device& device, Timeout timeout) {
            return WorldState::over_store(store, rank, size, options_for(device, timeout));
          },
          Release(), py::arg("store"), py::arg("rank"), py::arg("size"), py::arg("device"), py::arg("timeout"),
          "The ranks that meet at this store, with the timeout of every wait. Blocks.")
      .def_property_readonly("rank", &World::rank)
      .def_property_readonly("size", &World::size)
      .def("barrier", &World::barrier, Release())
      .def("split", &World::split, Release(), py::arg("color"), py::arg("key") = 0);
  py::class_<Timeline>(module, "Timeline", "What every rank does when (lockstep/timeline.h).")
      .def(py::init([](const World& world, const std::string& file, std::int64_t first, std::int64_t end) {
             return std::make_unique<Timeline>(world, file, StepRange{first, end});
           }),
           Release(), py::arg("world"), py::arg("file"), py::arg("first"), py::arg("end"))
      .def("begin_step", &Timeline::begin_step, py::arg("step"))
      .def("finish", &Timeline::finish, Release(), py::arg("together") = true);
  module.def("timeout_of", &timeout_of, py::arg("group"), py::arg("device"), "Of a process group; None: not known.");
  module.def(
      "normalise_over_ranks",
      [](const World& world, const torch::Tensor& input, double eps) {
        return normalise_over_ranks(world, input, eps, &loss_weight);
      },
      Release(), py::arg("world"), py::arg("input"), py::arg("eps"),
      "(output, mean, unbiased variance) of (B, C, ...) over the samples of all ranks. Blocks.");
}

}  // namespace lockstep::python
