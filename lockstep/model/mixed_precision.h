// SPDX-License-Identifier: Apache-2.0
// model/mixed_precision.h: computes in bfloat16 while parameters, their gradients and the update stay in float32.
//
// Flow:    a Task -> the same with forward() under libtorch's autocast -> strategy/
// Threads: autocast is on in the thread that runs forward(), while it runs
// Ranks:   no communication
#pragma once

#include "lockstep/task.h"

namespace lockstep {

// Matrix products and convolutions take bfloat16; sums that need more take float32, as autocast's lists say (PyTorch's
// torch.amp); the output becomes float32, so the loss is computed in it. Micikevicius et al., "Mixed Precision
// Training" (2018); bfloat16 has float32's range and needs no loss scaling (Kalamkar et al., 2019).
Task in_mixed_precision(Task task);

}  // namespace lockstep
