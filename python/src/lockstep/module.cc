// SPDX-License-Identifier: Apache-2.0
// lockstep/_C: the extension module of the Python package. bindings.h lists its parts.
#include "bindings.h"

#include "lockstep/stop.h"

PYBIND11_MODULE(_C, module) {
  pybind11::module_::import("torch.distributed");  // knows Store and Backend
  lockstep::python::bind_errors(module);
  lockstep::python::bind_backend(module);
  lockstep::python::bind_data(module);
  lockstep::python::bind_world(module);
  lockstep::python::bind_optimizers(module);
  lockstep::python::bind_replica(module);
  lockstep::python::bind_checkpoints(module);
  lockstep::python::bind_recovery(module);
  module.def("catch_stop_signals", &lockstep::catch_stop_signals);
  module.def("stop_requested", &lockstep::stop_requested);
  module.def("stop_signal", &lockstep::stop_signal);
}
