// SPDX-License-Identifier: Apache-2.0
// The slow part of every file that uses torch, compiled once. Torch's headers only: nothing of lockstep's.
// Each unit instantiates again what templates these headers leave open, so torch's modules and optimizers, which leave
// most open, are not among them.
#pragma once

#include <torch/csrc/autograd/variable.h>
#include <torch/nn/module.h>
#include <torch/types.h>
