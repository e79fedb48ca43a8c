// strategy/ddp.h: data parallel training with a replica of the model in every rank, as in PyTorch's
// DistributedDataParallel (Li et al., VLDB 2020). S1.
//
// Flow:    model/ -> ddp -> gradient/ -> optimizer/
// Owns:    the exchange; the module and the optimizer stay the user's and must outlive this
// Threads: one thread
// Ranks:   every rank constructs it at the same time and makes the same calls in the same order
#pragma once

#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>
#include <torch/types.h>

#include <cstdint>
#include <memory>

#include "lockstep/collective/world.h"
#include "lockstep/gradient/published_gradients.h"
#include "lockstep/gradient/reducer.h"
#include "lockstep/model/parameter_block.h"
#include "lockstep/optimizer/optimizer.h"

namespace lockstep {

struct DistributedDataParallelOptions {
  std::size_t bucket_bytes = ReducerOptions{}.bucket_bytes;
  bool broadcast_buffers = true;  // rank 0's running statistics go to everyone after each backward

  // With a lockstep optimizer: one copy of parameters and optimizer state per machine, and reduction and update in one pass
  // (docs/design/fused-step.md). Between backward() and step(), .grad is this rank's own gradient. false: every rank has
  // its own parameters, and after backward() .grad is the mean.
  bool share_parameters = true;
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

  // With one of lockstep's: see Options::share_parameters. Throws also UsageError: the optimizer has stepped already.
  DistributedDataParallel(World world, torch::nn::Module& module, Optimizer& optimizer, const Options& options = {});

  ~DistributedDataParallel();
  DistributedDataParallel(const DistributedDataParallel&) = delete;
  DistributedDataParallel& operator=(const DistributedDataParallel&) = delete;

  // Runs loss.backward() and exchanges. loss: this rank's mean over its `samples`, a scalar. A rank without samples passes
  // no loss and 0: it takes part, and its gradient counts for nothing. Blocks until the gradients of all ranks are there.
  // Sends 2(N-1)/N * K; nothing within a machine whose ranks share parameters.
  // Throws PeerLost, and what backward() throws; after that, UsageError: the program should end.
  void backward(const torch::Tensor& loss, std::int64_t samples);

  // A plain loss.backward() works too: every rank then counts as one sample, and last_batch() knows no loss (NaN). With
  // shared parameters the exchange then happens in step(), and gradients are copied once.

  // Of the last exchange, over all ranks: the same values on every rank.
  const BatchTotals& last_batch() const;

  // Seconds of the last backward() that were spent waiting for the exchange after the gradients were computed.
  double exchange_seconds() const;

  // Every rank has just written the same values into parameters, from a checkpoint for instance. Blocks until all have.
  void parameters_written();

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace lockstep
