// SPDX-License-Identifier: Apache-2.0
// lockstep/sync_batch_norm.h: batch normalisation over the global batch: mean and variance are taken over the samples of
// all ranks, so N ranks compute what one would (Ioffe and Szegedy, 2015; PyTorch's SyncBatchNorm).
//
// Flow:    in a model's forward(), in place of torch::nn::BatchNorm1d/2d/3d
// Owns:    weight, bias, running statistics; a group of ranks of its own
// Threads: one thread, as the model
// Ranks:   all ranks of the world call forward() and backward() in the same order, each with one sample at least
//
// The loss of a rank is the mean over its samples, and ranks are weighted by their number of samples, as in
// DistributedDataParallel: uneven parts are then exact too, with one forward() per step.
//
// Each forward in training sends 2 C + 1 values, each backward 2 C, for C channels.
#pragma once

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include "lockstep/world.h"

namespace lockstep {

// Computes what SyncBatchNorm does in training: (x - mean) / sqrt(variance + eps) for (B, C, ...), with mean and variance (C)
// over the samples of all ranks; returns {that, mean, unbiased variance}. loss_weight is asked in backward(): how often
// this rank's loss counts in the mean over all ranks, in a unit of all ranks; left out: as often as it has values here.
// Throws PeerLost; in a backward() that makes a graph UsageError.
Tensors normalise_over_ranks(const World& world, const Tensor& input, double eps,
                             const std::function<double()>& loss_weight = {});

struct SyncBatchNormOptions {
  int64_t features = 0;  // C
  double eps = 1e-5;
  double momentum = 0.1;  // of the running statistics
};

class SyncBatchNormImpl : public torch::nn::Module {
 public:
  SyncBatchNormImpl(const World& world, const SyncBatchNormOptions& options);

  // (B, C, ...) -> the same shape, floating point. In eval mode with the running statistics, without communication.
  // Throws UsageError (another number of channels), PeerLost.
  Tensor forward(const Tensor& input);

  Tensor weight, bias;               // (C)
  Tensor running_mean, running_var;  // (C), buffers

 private:
  World world_;
  SyncBatchNormOptions options_;
};
TORCH_MODULE(SyncBatchNorm);

}  // namespace lockstep
