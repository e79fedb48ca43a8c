// strategy/ddp.h: data parallel training with a replica of the model in every rank, as in PyTorch's
// DistributedDataParallel (Li et al., VLDB 2020). S1.
//
// Flow:    model/ -> ddp -> gradient/reducer.h -> collective/; afterwards every .grad is the mean over all samples
// Owns:    the reducer and its hooks; the module and the optimizer stay the user's and must outlive this
// Threads: one thread
// Ranks:   every rank constructs it at the same time and makes the same calls in the same order
#pragma once

#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>
#include <torch/types.h>

#include <cstdint>

#include "lockstep/collective/world.h"
#include "lockstep/gradient/reducer.h"

namespace lockstep {

struct DistributedDataParallelOptions {
  std::size_t bucket_bytes = ReducerOptions{}.bucket_bytes;
  bool broadcast_buffers = true;  // rank 0's running statistics go to everyone after each backward
};

class DistributedDataParallel {
 public:
  using Options = DistributedDataParallelOptions;

  // Compares names, dtypes, shapes and strides over the ranks, then gives every rank the parameters and buffers of rank
  // 0. Blocks. Sends K once. Works with any torch::optim optimizer: after backward() the gradients are the mean.
  // Throws MismatchError (models that differ, naming the tensor), DeviceError (a parameter not on world.device()),
  // PeerLost.
  DistributedDataParallel(World world, torch::nn::Module& module, const Options& options = {});

  // The same with the optimizer that will step. Throws UsageError if it holds a tensor that is not the module's.
  DistributedDataParallel(World world, torch::nn::Module& module, const torch::optim::Optimizer& optimizer,
                          const Options& options = {});

  // Runs loss.backward() and exchanges while it runs. loss: this rank's mean over its `samples`, a scalar. A rank without
  // samples passes no loss and 0: it takes part, and its gradient counts for nothing. Blocks until the gradients are
  // there. Sends 2(N-1)/N * K.
  // Throws PeerLost, and what backward() throws; after that, UsageError: the program should end.
  void backward(const torch::Tensor& loss, std::int64_t samples);

  // A plain loss.backward() works too: every rank then counts as one sample, and last_batch() knows no loss (NaN).

  // Of the last backward(), over all ranks: the same values on every rank.
  const BatchTotals& last_batch() const { return last_batch_; }

  // Seconds of the last backward() that were spent waiting for the exchange after the gradients were computed.
  double exchange_seconds() const { return exchange_seconds_; }

 private:
  void finish_backward(const BatchTotals& totals);

  World world_;
  std::vector<NamedTensor> parameters_;
  std::vector<NamedTensor> buffers_;
  Reducer reducer_;
  BatchTotals last_batch_;
  double exchange_seconds_ = 0;
};

}  // namespace lockstep
