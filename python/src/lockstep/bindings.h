// SPDX-License-Identifier: Apache-2.0
// The parts of lockstep/_C, the extension module of the Python package. Each adds its classes and functions.
#pragma once

#include <torch/csrc/utils/pybind.h>

namespace lockstep::python {

void bind_backend(pybind11::module_& module);  // torch.distributed's backend
void bind_data(pybind11::module_& module);     // datasets, loader and sampler

}  // namespace lockstep::python
