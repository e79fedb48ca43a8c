// SPDX-License-Identifier: Apache-2.0
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <pybind11/chrono.h>
#include <pybind11/stl.h>

#include "bindings.h"
#include "lockstep/collective/c10d/backend.h"
#include "lockstep/collective/meet/rendezvous.h"

namespace lockstep::python {
namespace {

namespace py = pybind11;
using StorePtr = c10::intrusive_ptr<c10d::Store>;

// With torch's own return type: Python sees it as a torch.distributed Backend.
c10::intrusive_ptr<c10d::Backend> create_backend(const StorePtr& store, int rank, int size,
                                                 std::chrono::milliseconds timeout) {
  return c10::make_intrusive<C10dBackend>(store, rank, size, timeout);
}

// For a process group of the ranks that a launcher has started: where they meet, this rank, and how many there are.
std::tuple<StorePtr, int, int> meet_launched_ranks(std::chrono::milliseconds timeout) {
  const JobEnvironment job = read_job_environment();
  return {connect_process_group(job, timeout), job.rank, job.world_size};
}

}  // namespace

void bind_backend(py::module_& module) {
  module.def("create_backend", &create_backend, py::arg("store"), py::arg("rank"), py::arg("size"), py::arg("timeout"),
             py::call_guard<py::gil_scoped_release>(), "Blocks until all ranks are connected.");
  module.def("meet_launched_ranks", &meet_launched_ranks, py::arg("timeout"), py::call_guard<py::gil_scoped_release>(),
             "(store, rank, size) of the ranks that a launcher has started. Blocks until rank 0 answers; rank 0 until "
             "all have "
             "come.");
}

}  // namespace lockstep::python
