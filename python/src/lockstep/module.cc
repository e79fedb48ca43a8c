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
  module.def(
      "catch_stop_signals", &lockstep::catch_stop_signals, pybind11::arg("signals") = std::vector<int>(),
      "catch_stop_signals(signals: list[int] = []) -> None\n\n"
      "From now on these signals (without any: SIGTERM and SIGUSR1) only make a note for stop_requested(). A signal\n"
      "that the program handles itself stays as it is; so does Python's own SIGINT.");
  module.def(
      "stop_requested", &lockstep::stop_requested,
      "stop_requested() -> bool\n\n"
      "Whether a rank of this job was asked to stop by a signal before its part of the last exchange of gradients of "
      "a\n"
      "lockstep.DistributedDataParallel: the same on all ranks after the same step. Where there is one rank: whether\n"
      "it was asked. The first call catches the signals, as catch_stop_signals() does.");
  module.def("stop_signal", &lockstep::stop_signal,
             "stop_signal() -> int\n\nThe first such signal that this process itself has got; 0: none.");
}
