// SPDX-License-Identifier: Apache-2.0
// The parts of lockstep/_C, the extension module of the Python package. Each adds its classes and functions.
#pragma once

#include <torch/csrc/utils/pybind.h>

namespace lockstep::python {

void bind_errors(pybind11::module_& module);       // lockstep's errors as Python exceptions
void bind_backend(pybind11::module_& module);      // torch.distributed's backend
void bind_data(pybind11::module_& module);         // datasets, loader and sampler
void bind_world(pybind11::module_& module);        // World, batch normalisation over its ranks, Timeline
void bind_optimizers(pybind11::module_& module);   // SGD, Adam, AdamW, LAMB, LARS
void bind_replica(pybind11::module_& module);      // DistributedDataParallel
void bind_checkpoints(pybind11::module_& module);  // Checkpoints
void bind_recovery(pybind11::module_& module);     // what Recovery keeps

}  // namespace lockstep::python
