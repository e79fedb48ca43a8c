// SPDX-License-Identifier: Apache-2.0
// plan/measure_compression.h: what compressing a model's gradients takes, beside what their exchange does.
//
// Threads: one
// Ranks:   no communication: hooks run in a world of one rank
#pragma once

#include <torch/nn/module.h>

#include <vector>

#include "lockstep/plan/profile.h"

namespace lockstep::plan {

// Of every kind of --compression with its default amount, on one thread. Blocks for a second or two.
std::vector<CompressionTimes> measure_compression(const torch::nn::Module& model);

}  // namespace lockstep::plan
