// SPDX-License-Identifier: Apache-2.0
// lockstep/_C: the extension module of the Python package. bindings.h lists its parts.
#include "bindings.h"
#include "lockstep/stop.h"

PYBIND11_MODULE(_C, module) {
  using namespace lockstep::python;
  py::module_::import("torch.distributed");  // knows Store and Backend
  bind_errors(module);
  bind_data(module);
  bind_world(module);
  bind_kvstore(module);
  bind_devices(module);
  bind_optimizers(module);
  bind_replica(module);
  bind_recovery(module);
  module.def("catch_stop_signals", &lockstep::catch_stop_signals);
  module.def("stop_requested", &lockstep::stop_requested);
  module.def("stop_signal", &lockstep::stop_signal);
}
