// lockstep/ddp.h: data parallel training with a replica of the model in every rank, as in PyTorch's
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
#include <set>
#include <string>

#include "lockstep/gradient/published_gradients.h"
#include "lockstep/gradient/reducer.h"
#include "lockstep/model/parameter_block.h"
#include "lockstep/optimizer.h"
#include "lockstep/world.h"

namespace lockstep {

struct DistributedDataParallelOptions {
  std::size_t bucket_bytes = ReducerOptions{}.bucket_bytes;
  bool broadcast_buffers = true;  // rank 0's running statistics go to everyone after each backward

  // With a lockstep optimizer: one copy of parameters and optimizer state per machine, and reduction and update in
  // one pass (docs/design/fused-step.md). Between backward() and step(), .grad is this rank's own gradient. false:
  // every rank has its own parameters, and after backward() .grad is the mean.
  bool share_parameters = true;

  // A parameter that takes no part in a backward() counts as zero, and one that takes part on no rank keeps an
  // undefined gradient; the graph is walked only once a step has left one out. false: on a rank with samples it is an
  // error that names the parameters.
  bool find_unused_parameters = true;

  // Where gradients go through buckets (several machines, a hook, or separate parameters): see gradient/reducer.h.
  // Gradients that are read where they lie need neither.
  bool static_graph = false;
  bool gradient_as_bucket_view = false;

  // Parameters and buffers, by name, that are left alone: not compared, not sent, their gradients not exchanged. Shared
  // parameters allow it only for what the optimizer does not hold.
  std::set<std::string> ignored{};

  // Parameters with sparse gradients beside those of an Embedding or EmbeddingBag with sparse(true), which are found.
  // Through buckets only their rows are sent, and .grad is sparse; shared parameters are updated as by a dense
  // gradient.
  std::set<std::string> sparse_parameters{};

  // Other ways to sum a bucket (lockstep/communication_hook.h). What is sent is then not what was computed, so every
  // rank goes through buckets, also within a machine.
  std::shared_ptr<CommunicationHook> hook = nullptr;

  // Of the all-reduce of a bucket. Others than kDirect, for study: then every rank goes through buckets, as with a
  // hook. Between machines kRing, too. S1.
  Algorithm algorithm = Algorithm::kDirect;

  // V: the global batch is cut into V shards whatever the number of ranks (a divisor of V), and every rank calls
  // backward() for each of its V/N shards in turn; the last one exchanges. The sum over shards has one order, so 1,
  // 2, 4 ... V ranks give the same bits, if a shard's gradient has: the same intra-op threads, random numbers that
  // depend on the shard. Needs shared parameters and all ranks on one machine; buffers are then those of shard 0. 0:
  // off.
  int virtual_shards = 0;
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

  // With one of lockstep's: see Options::share_parameters. Throws also UsageError: the optimizer has stepped already,
  // or Options::virtual_shards can't be had.
  DistributedDataParallel(World world, torch::nn::Module& module, Optimizer& optimizer, const Options& options = {});

  ~DistributedDataParallel();
  DistributedDataParallel(const DistributedDataParallel&) = delete;
  DistributedDataParallel& operator=(const DistributedDataParallel&) = delete;

  // Runs loss.backward() and exchanges. loss: this rank's mean over its `samples`, a scalar. A rank without samples
  // passes no loss and 0: it takes part, and its gradient counts for nothing. Blocks until the gradients of all ranks
  // are there. Sends 2(N-1)/N * K; nothing within a machine whose ranks share parameters. Throws PeerLost, and what
  // backward() throws; after that, UsageError: the program should end.
  void backward(const torch::Tensor& loss, std::int64_t samples);

  // While the guard lives, backward() adds gradients up on this rank and exchanges nothing: for several backward()
  // per step. The next backward() without a guard exchanges their sum, which is the sum of the mean gradients of them
  // all. S1.
  class NoSync;
  [[nodiscard]] NoSync no_sync();

  // For ranks that may run out of batches at different times: called by each when it has none left, instead of
  // backward() and step(), with the same optimizer. Takes part without samples, step by step, until no rank has any.
  // Throws PeerLost.
  void join(torch::optim::Optimizer& optimizer);

  // A plain loss.backward() works too: every rank then counts as one sample, and last_batch() knows no loss (NaN). With
  // shared parameters the exchange then happens in step(), and gradients are copied once.

  // Of the last exchange, over all ranks: the same values on every rank.
  const BatchTotals& last_batch() const;

  // Since the start, on this rank: what went through buckets, or was published and read where it lies.
  struct Statistics {
    std::int64_t exchanges = 0;
    std::int64_t bytes = 0;
    double exchange_seconds = 0;  // from the first bucket sent until all are back
    double waiting_seconds = 0;   // after the last gradient was computed: what did not overlap with backward
    double overlap() const { return exchange_seconds > waiting_seconds ? 1 - waiting_seconds / exchange_seconds : 0; }
  };
  Statistics statistics() const;

  // Seconds of the last backward() that were spent waiting for the exchange after the gradients were computed.
  double exchange_seconds() const;

  // Every rank has just written the same values into parameters, from a checkpoint for instance. Blocks until all have.
  void parameters_written();

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

class DistributedDataParallel::NoSync {
 public:
  ~NoSync() { *on_ = before_; }
  NoSync(const NoSync&) = delete;
  NoSync& operator=(const NoSync&) = delete;

 private:
  friend class DistributedDataParallel;
  explicit NoSync(bool* on) : on_(on), before_(*on) { *on = true; }
  bool* on_;
  bool before_;
};

}  // namespace lockstep
