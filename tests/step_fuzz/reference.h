// SPDX-License-Identifier: Apache-2.0
// tests/step_fuzz/reference.h: what a legal program computes: on one rank, with torch::optim, in float64, over the global
// batches; what lossy hooks and batch normalisation of each rank do is replayed rank by rank. Written apart from the
// product: it shares only the model and the data.
#pragma once

#include <torch/types.h>

#include <map>
#include <utility>
#include <vector>

#include "tests/step_fuzz/program.h"

namespace lockstep::fuzz {

struct Totals {
  int samples = 0;
  double mean_loss = 0;  // NaN: not known
};

// Of one trainer in one of its worlds, at the end.
struct Expected {
  std::vector<torch::Tensor> weights;
  std::vector<torch::Tensor> averages;  // undefined: never updated
  std::vector<torch::Tensor> stats;     // buffers
  bool undecided = false;               // a lossy hook's choice hung on rounding: nothing to compare

  // Of each rank, by the id of a backward() that exchanges a single batch.
  std::map<std::pair<int, int>, Totals> totals;

  // How far float32 is off for a program in float32, divided by a tensor's largest value.
  double rounding = 0;
};

Expected expected_of(const Program& program, size_t trainer, int color);

}  // namespace lockstep::fuzz
