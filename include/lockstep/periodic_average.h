// SPDX-License-Identifier: Apache-2.0
// lockstep/periodic_average.h: post-local SGD for a training loop of your own (Lin et al., "Don't use large mini-batches,
// use local SGD", ICLR 2020): after some steps that exchange gradients, ranks train alone and average their parameters
// every few steps. The bytes sent fall by `every`.
//
//   const auto guard = average.is_local() ? std::optional(ddp.no_sync()) : std::nullopt;
//   ddp.backward(loss, samples);  optimizer.step();  optimizer.zero_grad();
//   average.after_step();
//
// DistributedDataParallel needs share_parameters = false for this.
//
// Flow:    the module's parameters, after the optimizer's step -> World::all_reduce -> the same parameters
// Owns:    a reference to each parameter
// Threads: one thread
// Ranks:   every rank makes the same calls in the same order
#pragma once

#include <torch/nn/module.h>

#include "lockstep/world.h"

namespace lockstep {

struct PeriodicAverageOptions {
  int64_t first_steps = 0;  // that exchange gradients
  int64_t every = 8;        // steps between averages afterwards
};

class PeriodicAverage {
 public:
  // Throws UsageError: options out of range, or parameters of 16 bits (optimizers keep a float32 copy of them, which
  // would not see the average).
  PeriodicAverage(World world, const torch::nn::Module& module, const PeriodicAverageOptions& options);

  bool is_local() const { return steps_ >= options_.first_steps; }  // the next step exchanges no gradients

  // Counts a step. If an average is due, blocks until every rank has the same mean parameters, and sends 2(N-1)/N K.
  // Throws PeerLost.
  void after_step();

 private:
  World world_;
  Tensors parameters_;
  PeriodicAverageOptions options_;
  int64_t steps_ = 0;
};

}  // namespace lockstep
