// SPDX-License-Identifier: Apache-2.0
// collective/operator_spans.h: modules in a trace: a span for each operator of a forward() that autograd takes part in,
// and one for its part of backward().
//
// Flow:    torch's RecordFunction -> here -> observe/trace.h
// Owns:    the names of the last nodes of autograd. Parameters have their module's name themselves (torch's Tensor::name)
// Threads: any
// Ranks:   no communication
//
// While something is recorded an operator costs about a microsecond more; else nothing.
//
// libtorch's modules have no hooks. But torch tells of each operator with its inputs, and of each node of autograd with
// the number that its operator gave it (what torch.profiler draws its arrows by). An operator with a parameter among its
// inputs is shown by the name of the module that has the parameter, "conv1"; any other by its own name, "relu".
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

namespace lockstep {

// Names a parameter after its module: "features.0.weight" is one of "features.0". A later name replaces an earlier one.
void name_parameter(const at::Tensor& parameter, const std::string& path);

template <class NamedTensors>
void name_modules(const NamedTensors& parameters) {
  for (const auto& [path, parameter] : parameters) name_parameter(parameter, path);
}

}  // namespace lockstep
