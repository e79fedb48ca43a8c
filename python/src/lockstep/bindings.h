// SPDX-License-Identifier: Apache-2.0
// The parts of lockstep/_C, the extension module of the Python package. Each adds its classes and functions.
#pragma once

#include <pybind11/chrono.h>
#include <pybind11/stl.h>
#include <pybind11/stl/filesystem.h>
#include <torch/csrc/utils/pybind.h>

namespace lockstep::python {

namespace py = pybind11;
using Release = py::call_guard<py::gil_scoped_release>;  // other Python threads run meanwhile

void bind_errors(py::module_& module);       // lockstep's errors as Python exceptions
void bind_backend(py::module_& module);      // torch.distributed's backend
void bind_data(py::module_& module);         // datasets, loader and sampler
void bind_world(py::module_& module);        // World, batch normalisation over its ranks, Timeline
void bind_optimizers(py::module_& module);   // SGD, Adam, AdamW, LAMB, LARS
void bind_replica(py::module_& module);      // DistributedDataParallel
void bind_checkpoints(py::module_& module);  // Checkpoints
void bind_recovery(py::module_& module);     // what Recovery keeps

}  // namespace lockstep::python
