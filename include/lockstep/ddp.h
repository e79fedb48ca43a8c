// SPDX-License-Identifier: Apache-2.0
// lockstep/ddp.h: data parallel training with a replica of the model in every rank, as in PyTorch's
// DistributedDataParallel (Li et al., "PyTorch Distributed", VLDB 2020).
//
// Flow:    loss -> backward() -> exchange of gradients -> the optimizer's step()
// Owns:    the exchange; the module and the optimizer stay the user's and must outlive this
// Threads: one thread
// Ranks:   every rank constructs it at the same time and makes the same calls in the same order
#pragma once

#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <set>

#include "lockstep/batch_totals.h"
#include "lockstep/communication_hook.h"

namespace lockstep {

struct DistributedDataParallelOptions {
  size_t bucket_bytes = 0;  // of gradients that are all-reduced at once; 0: of CPUs 8 MiB, with a hook or on GPUs 25
  bool broadcast_buffers = true;  // rank 0's running statistics go to every rank after each backward

  // true: the ranks of a machine share one copy of the parameters and of the optimizer's state, if the optimizer is one
  // of lockstep's and the parameters are on the CPU. false: every rank has its own.
  bool share_parameters = true;

  // true: where ranks are GPUs and the optimizer is one of lockstep's, but not LAMB or LARS, each rank updates a slice of the
  // parameters and has the optimizer's state of that slice only: buckets are reduce-scattered, and step() ends with an all-gather
  // of the parameters. .grad then stays this rank's own. What this can't do is an error: a plain loss.backward(), a gradient
  // that is written between backward() and step(), a second backward() without zero_grad() or no_sync(). The optimizer's
  // state_of() is then a call of all ranks, in the same order. Beside a hook, an algorithm, mean_in_grad,
  // gradient_as_bucket_view, sparse gradients, or parameters that the optimizer does not hold, every rank updates all.
  bool slice_update = false;

  // true: after backward() .grad is the mean over all samples of all ranks, as in PyTorch. false: where all ranks are on
  // one machine and share parameters, .grad stays this rank's own gradient, and step() sums the gradients of all ranks
  // and updates in one pass, which is faster (docs/design/fused-step.md). Everywhere else .grad is the mean in any case:
  // mean_in_grad() says which it is.
  bool mean_in_grad = false;

  // true: a parameter that takes no part in a backward() counts as zero; unused on every rank, it keeps an undefined
  // .grad. The graph is walked only once a step has left a parameter out. false: a rank with samples throws an error
  // that names the unused parameters.
  bool find_unused_parameters = true;

  // For gradients that go through buckets (several machines, a hook, separate parameters, mean_in_grad):
  // static_graph: every step uses the same parameters in the same way as the first, so a gradient may become ready
  // several times in one backward() (activation checkpointing). gradient_as_bucket_view: .grad is a view of the bucket,
  // which saves one copy of the gradients.
  bool static_graph = false;
  bool gradient_as_bucket_view = false;

  // Names of parameters and buffers that are left alone: not compared, not sent, their gradients not exchanged. Shared
  // parameters allow it only for what the optimizer does not hold.
  std::set<std::string> ignored{};

  // Names of parameters with sparse gradients, besides those of an Embedding or EmbeddingBag with sparse(true), which
  // are found. Through buckets only their rows are sent, and .grad is sparse; shared parameters are updated as by a
  // dense gradient.
  std::set<std::string> sparse_parameters{};

  // Another way to sum a bucket (lockstep/communication_hook.h). The sum then differs from the exact one, so the
  // gradients go through buckets on every rank, also within a machine.
  std::shared_ptr<CommunicationHook> hook = nullptr;

  // The algorithm that all-reduces a bucket. Any other than kDirect is for study and makes gradients go through buckets. Between
  // machines: kDirect or kRing.
  Algorithm algorithm = Algorithm::kDirect;

  // V > 0: the global batch is cut into V shards whatever the number N of ranks (a divisor of V), and every rank calls
  // backward() for each of its V/N shards in turn; the last one exchanges. The sum over shards has one order, so 1, 2,
  // 4 ... V ranks give the same bits, if a shard's gradient has: the same intra-op threads, random numbers that depend
  // on the shard. Needs shared parameters and all ranks on one machine, or GPUs with slice_update and an
  // optimizer other than LAMB and LARS; buffers are then those of shard 0.
  int virtual_shards = 0;
};

class DistributedDataParallel {
 public:
  using Options = DistributedDataParallelOptions;

  // Compares names, dtypes, shapes and strides over the ranks, then gives every rank the parameters and buffers of rank
  // 0. Blocks. Sends all of them once. After backward() .grad is the mean, for any optimizer.
  // Throws UsageError (a name that is not the module's; virtual shards that can't be had), MismatchError (models that
  // differ, naming the tensor), DeviceError (a parameter not on world.device()), PeerLost.
  DistributedDataParallel(World world, torch::nn::Module& module, const Options& options = {});

  // With the optimizer that will step, of torch's or of lockstep's: see Options::share_parameters. Throws also
  // UsageError: it holds a tensor that is not the module's, or has stepped already.
  DistributedDataParallel(World world, torch::nn::Module& module, torch::optim::Optimizer& optimizer,
                          const Options& options = {});

  ~DistributedDataParallel();
  DistributedDataParallel& operator=(DistributedDataParallel&&) = delete;

  // Runs loss.backward() and exchanges. loss: this rank's mean over its `samples`, a scalar. A rank without samples
  // passes an undefined loss and 0: it has weight 0, and its gradient is never read. Blocks until the gradients of all ranks
  // have arrived. Each of N ranks sends 2(N-1)/N times its gradients' bytes; nothing where ranks read each other's.
  // scale: of the gradients; 1/T in each of T backward() of a step gives the mean over all their samples. Throws PeerLost,
  // and what backward() throws; after that, UsageError: the program should end.
  void backward(const Tensor& loss, const BatchWeight& samples, double scale = 1);

  // backward() in two halves, for a backward() that is run elsewhere, such as Python's loss.backward(): begin_backward()
  // in a hook, on the thread that runs it and before it adds to any .grad; end_backward() after it has added to the last
  // one. begin_backward() returns the factor by which hooks must multiply each gradient; 0: replace it by zeros. The loss
  // stays unknown (last_batch().mean_loss is NaN). With 0 samples end_backward() may follow at once. Ranks may also count
  // alike (batch_totals.h): last_batch().samples is then the number of ranks that have a batch, and ranks of which some
  // count alike and others by samples get a MismatchError.
  // cancel_backward() instead, if it failed: the other ranks get PeerLost with `reason`. They block and throw as
  // backward() does.
  double begin_backward(const BatchWeight& batch);
  void end_backward();
  void cancel_backward(const std::string& reason);

  // While the guard exists, backward() adds to this rank's .grad and exchanges nothing: for several backward() per
  // step. The next backward() without a guard exchanges their sum: the sum of the mean gradients of them all.
  class NoSync;
  [[nodiscard]] NoSync no_sync();

  // Between the last backward() of a step and step(), on every rank: .grad becomes the mean over all samples of all ranks, where
  // mean_in_grad() says that it is not already. Then what torch and others do with .grad is right, such as
  // torch::nn::utils::clip_grad_norm_, if all ranks do the same; step() uses what it finds there. Blocks. Gradients are read and
  // written once more than in a step without it, or with set_clipping() of the optimizer.
  // Throws UsageError (virtual shards; slice_update), MismatchError on all ranks (some have left it out), PeerLost.
  void mean_gradients();

  // For ranks that may run out of batches at different times: called by each when it has none left, instead of
  // backward() and step(), with the same optimizer. Takes part without samples, step by step, until no rank has any.
  // Throws PeerLost.
  void join(torch::optim::Optimizer& optimizer);

  // A plain loss.backward() works too: every rank then counts as one sample, and last_batch() knows no loss (NaN).
  // Where ranks read each other's gradients, the exchange then happens in step(), and gradients are copied once; what
  // backward() has added counts until zero_grad(), and the two kinds of backward() can't add to one .grad.

  World world() const;
  torch::nn::Module& module() const;

  // Returns the totals of the last exchange over all ranks: the same values on every rank.
  const BatchTotals& last_batch() const;

  // Tells whether .grad is the mean over all ranks between backward() and step(), or this rank's own gradient.
  bool mean_in_grad() const;

  // Since the start, on this rank.
  struct Statistics {
    int64_t exchanges = 0;
    int64_t bytes = 0;            // of gradients in buckets, or published for other ranks to read
    double exchange_seconds = 0;  // from the first bucket sent until all are back
    double waiting_seconds = 0;   // after the last gradient was computed: what did not overlap with backward
    double overlap() const { return exchange_seconds > waiting_seconds ? 1 - waiting_seconds / exchange_seconds : 0; }
  };
  Statistics statistics() const;

  // Every rank has just written the same values into parameters, from a checkpoint for instance. Blocks until all have.
  void parameters_written();

  // Calls write(), without autograd, in which every rank writes the same values into parameters. Blocks until all have.
  // Parameters that the ranks of a machine share are copies of this rank's own meanwhile, also for tensors that share their
  // storage, so that write() may read them, too. Where it throws, they have the values of before, the other ranks get PeerLost,
  // and the world can't be used after that. With LOCKSTEP_CHECK set (docs/correctness.md) they can be written in no other way.
  // Throws MismatchError on all ranks, naming a parameter whose values differ; UsageError: parameters were written by hand
  // before, or through a pointer from before.
  void write_parameters(const std::function<void()>& write);

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

class DistributedDataParallel::NoSync {
 public:
  ~NoSync() { *on_ = before_; }
  NoSync& operator=(NoSync&&) = delete;

 private:
  friend class DistributedDataParallel;
  explicit NoSync(bool* on) : on_(on), before_(*on) { *on = true; }
  bool* on_;
  bool before_;
};

}  // namespace lockstep
