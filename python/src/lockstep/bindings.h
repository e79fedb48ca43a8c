// SPDX-License-Identifier: Apache-2.0
// The parts of lockstep/_C, the extension module of the Python package. Each adds its classes and functions.
#pragma once

#include <pybind11/chrono.h>
#include <pybind11/stl.h>
#include <pybind11/stl/filesystem.h>
#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <utility>

namespace lockstep::python {

namespace py = pybind11;
using Release = py::call_guard<py::gil_scoped_release>;  // other Python threads run meanwhile

// May be copied and let go without the GIL.
inline std::shared_ptr<py::object> held(py::object object) {
  return {new py::object(std::move(object)), [](py::object* last) {
            const py::gil_scoped_acquire gil;
            delete last;
          }};
}

void bind_errors(py::module_& module);  // lockstep's errors as Python exceptions
void bind_data(py::module_& module);    // datasets, loader and sampler
void bind_world(
    py::module_& module);  // torch.distributed's backend, World, batch normalisation over its ranks, Timeline
void bind_kvstore(py::module_& module);     // KVStore
void bind_devices(py::module_& module);     // Devices
void bind_optimizers(py::module_& module);  // SGD, Adam, AdamW, …
void bind_replica(py::module_& module);     // DistributedDataParallel
void bind_recovery(py::module_& module);    // Checkpoints, what Recovery keeps

// The weight of this rank's loss in the mean over all ranks: of the backward() that goes on; outside of one 1, as torch's
// DistributedDataParallel counts.
double loss_weight();

}  // namespace lockstep::python
