// SPDX-License-Identifier: Apache-2.0
// lockstep/_C: the extension module of the Python package. Here are Python's exceptions of lockstep's errors; bindings.h
// lists the rest.
#include "bindings.h"
#include "lockstep/error.h"

namespace py = pybind11;

PYBIND11_MODULE(_C, module) {
  py::module_::import("torch.distributed");  // knows Store and Backend

  const auto& error = py::register_exception<lockstep::Error>(module, "Error", PyExc_RuntimeError);
  py::register_exception<lockstep::PeerLost>(module, "PeerLost", error);
  py::register_exception<lockstep::MismatchError>(module, "MismatchError", error);
  py::register_exception<lockstep::RendezvousError>(module, "RendezvousError", error);

  lockstep::python::bind_backend(module);
  lockstep::python::bind_data(module);
}
