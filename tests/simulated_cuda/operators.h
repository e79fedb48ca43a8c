// SPDX-License-Identifier: Apache-2.0
// tests/simulated_cuda/operators.h: what every operator and copy of a device does before it touches memory.
//
// Threads: any
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <string>
#include <vector>

#include "tests/simulated_cuda/happens_before.h"

namespace simulated_cuda {

// The same bytes, as memory that the simulator may touch: a CPU tensor that owns nothing.
at::Tensor host_view(const at::Tensor& tensor);

struct Touch {
  at::Tensor tensor;
  bool writes = false;
};

// Puts `work` on a stream and notes what it touches. Throws at a race.
Moment put(const std::string& work, const c10::Stream& stream, const std::vector<Touch>& touched);
// More that the work of `moment` touches.
void note_touch(const std::string& work, Moment moment, const c10::Stream& stream, const Touch& touch);

at::Tensor& copy(at::Tensor& to, const at::Tensor& from, bool non_blocking);

}  // namespace simulated_cuda
