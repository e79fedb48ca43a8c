// SPDX-License-Identifier: Apache-2.0
// lockstep/_C: makes a ShmBackend for torch.distributed, and Python exceptions of its errors.
#include <torch/csrc/utils/pybind.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <pybind11/chrono.h>

#include "lockstep/collective/c10d/backend.h"
#include "lockstep/error.h"

namespace py = pybind11;

namespace {

using StorePtr = c10::intrusive_ptr<c10d::Store>;

// With torch's own return type: Python sees it as a torch.distributed Backend.
c10::intrusive_ptr<c10d::Backend> create_backend(const StorePtr& store, int rank, int size,
                                                 std::chrono::milliseconds timeout) {
  return c10::make_intrusive<lockstep::ShmBackend>(store, rank, size, timeout);
}

}  // namespace

PYBIND11_MODULE(_C, module) {
  py::module_::import("torch.distributed");  // knows Store and Backend

  const auto& error = py::register_exception<lockstep::Error>(module, "Error", PyExc_RuntimeError);
  py::register_exception<lockstep::PeerLost>(module, "PeerLost", error);
  py::register_exception<lockstep::MismatchError>(module, "MismatchError", error);
  py::register_exception<lockstep::RendezvousError>(module, "RendezvousError", error);

  module.def("create_backend", &create_backend, py::arg("store"), py::arg("rank"), py::arg("size"), py::arg("timeout"),
             py::call_guard<py::gil_scoped_release>(), "Blocks until all ranks are connected.");
}
