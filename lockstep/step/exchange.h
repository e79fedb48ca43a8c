// SPDX-License-Identifier: Apache-2.0
// step/exchange.h: how the gradients of a step get from every rank's backward() to the optimizer: one interface, two
// implementations. step/layout.h says which one a program gets.
//
//                  published (published.cc)                buckets (buckets.cc)
//   where          all ranks on one machine, which         everywhere else; with a communication hook or an algorithm
//                  share the parameters                    by name
//   backward()     autograd writes into shared memory      starts to all-reduce full buckets
//   finish()       publishes places, one barrier           waits for the buckets
//   .grad          this rank's own                         the mean
//   step()         sums the gradients of all ranks         uses .grad
//
// Between GPUs a bucket may be reduce-scattered: .grad stays this rank's own, and step() uses the mean of the rank's slice
// (step/gradient_slices.h).
//
// The result is the mean over all samples: sum_j (m_j / n) grad_j over ranks j with m_j samples each, n = sum_j m_j.
// Several backward() add up until zero_grad(), as in PyTorch: T of them give T times the mean over all their samples.
//
// Flow:    DistributedDataParallel around backward() -> Exchange -> the optimizer's step()
// Owns:    memory for the exchange
// Threads: one thread; autograd's threads call the hooks of buckets
// Ranks:   every rank makes it at the same time, with the same parameters, and makes the same calls in the same order
#pragma once

#include <torch/types.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/collective/shared_memory.h"
#include "lockstep/ddp.h"
#include "lockstep/error.h"
#include "lockstep/model/parameter_block.h"
#include "lockstep/step/parallel_for.h"
#include "lockstep/step/step_agreement.h"
#include "lockstep/world.h"

namespace lockstep {

class GradientSlices;

// The gradients of one step. A parameter's mean gradient is the sum over sources s, in their order, of weights[s] times
// the gradient of s. A source is a rank, a virtual shard of a rank, or a device of this process. A source without a
// gradient counts as zero; a parameter that no source has a gradient for is left out of the step.
struct WeightedGradients {
  std::vector<double> weights;              // one per source; the same on every rank
  std::vector<const void*> pointers;        // [parameter][source]: dense, of the parameter's dtype and in its memory
                                            // order; nullptr: none
  ParallelFor parallel_for = on_own_cores;  // spreads the update over threads
};

// The half of an exchange that an optimizer sees. Gradients of one process need no other (step/local_gradients.h).
class GradientSource {
 public:
  explicit GradientSource(SharedMemoryPtr memory = SharedMemory::alone()) : memory_(std::move(memory)) {}
  virtual ~GradientSource() = default;

  // The ranks that share the parameters: each updates a slice.
  const SharedMemoryPtr& memory() const { return memory_; }

  // The number of sources of each gradient, where gradients are in memory that outlives the ranks; else 0.
  virtual size_t kept_sources() const { return 0; }

  // This rank's slice of parameters on GPUs; null: it updates all of them.
  virtual std::shared_ptr<GradientSlices> slices() const { return nullptr; }

  // The gradients of `parameters`; none with slices, which have them. The pointers stay valid and unchanged until
  // end_update(). Blocks until every rank's gradients are there, and the ranks that share parameters are about to update
  // with the same `settings`. Throws UsageError: a gradient was changed after backward(), or nothing was exchanged;
  // MismatchError on all ranks: other settings, or a step that some ranks do not make; PeerLost. Until then nothing was
  // written.
  virtual WeightedGradients begin_update(const Tensors& parameters, const StepSettings& settings) = 0;

  // This rank has updated its slice. Blocks until all ranks have: afterwards every parameter is new. Throws PeerLost.
  virtual void end_update() = 0;

 protected:
  SharedMemoryPtr memory_;
};

class Exchange : public GradientSource {
 public:
  using GradientSource::GradientSource;

  // The calls around a backward(), which adds to .grad. begin() on the thread that runs it, before the first gradient of
  // a parameter. loss: the mean over the batch of this rank; undefined: not known. exchanges: finish() follows end(); else
  // a later backward() exchanges the sum. Returns the factor by which its gradients must be multiplied, 0 without samples.
  // Throws UsageError after a backward() that failed: the ranks no longer agree on what was exchanged.
  virtual double begin(const BatchWeight& batch, const torch::Tensor& loss = {}, bool exchanges = true) = 0;
  virtual void end(bool exchanges = true) = 0;

  // Stands instead of end() if backward() failed: the other ranks get PeerLost with `reason` now and not at their deadline.
  virtual void cancel(const std::string& reason) = 0;

  // Blocks until the gradients of all ranks are there, then calls on_finished. Throws PeerLost; MismatchError on all
  // ranks: some of them differ in a setting, or are in a step() instead.
  virtual BatchTotals finish() = 0;

  // After a backward() or a plain loss.backward(): .grad becomes the mean on every rank, where it is not already. What is written
  // into it until step(), alike on all ranks, counts. Blocks until all ranks are here. Throws UsageError (it can't be made;
  // a gradient was changed before), MismatchError on all ranks (some are in another call), PeerLost.
  virtual void make_mean() = 0;

  // Forgets what was counted, after a finish() that found no samples on any rank: there is no step().
  virtual void drop() = 0;

  // The DistributedDataParallel is gone: begin_update() throws UsageError from now on.
  virtual void close() { is_closed_ = true; }

  // Since the start, on this rank.
  int64_t bytes() const { return bytes_; }  // of gradients given into collectives or a hook, or published
  // Buckets: from the first one sent until all are back. Published: in the exchange.
  double seconds() const { return seconds_; }

 protected:
  void require_open() const {
    if (is_closed_)
      throw UsageError(
          {.what = "step() of an optimizer whose DistributedDataParallel is gone",
           .likely = "a DistributedDataParallel that was not kept in a variable, or was destroyed too early",
           .next = "keep it as long as the optimizer steps, and call the model through it in Python"});
  }

  int64_t bytes_ = 0;
  double seconds_ = 0;

 private:
  bool is_closed_ = false;
};

// Called at the end of each exchange, also of one that a plain loss.backward() has caused: every rank then counts as one
// sample.
using OnFinished = std::function<void(const BatchTotals&)>;

struct PublishedOptions {
  std::shared_ptr<ParameterBlock> block = nullptr;  // checked before and marked after each step, where there is one

  // Number of backward() per step on this rank whose gradients are kept apart: its virtual shards
  // (docs/design/fused-step.md). 0: the gradients of all backward() of a step add up.
  int shards = 0;

  NamedTensors updated{};  // those whose .grad zero_grad() drops: the optimizer's. Empty: all
  OnFinished on_finished{};
};

// Blocks. Throws SystemError, PeerLost.
std::shared_ptr<Exchange> publish_gradients(SharedMemoryPtr memory, NamedTensors parameters,
                                            PublishedOptions options = {});

// Buckets need this beside DistributedDataParallel's options; `slices` exclude its hook, algorithm and sparse gradients.
struct BucketPlan {
  bool slices = false;  // each rank gets the mean of its slice only

  // Shared parameters, of which each rank updates a slice with the mean in .grad; null: each rank has its own.
  SharedMemoryPtr memory = nullptr;
  std::shared_ptr<ParameterBlock> block = nullptr;

  std::function<StepSettings()> settings{};  // compared over the ranks at the beginning of each exchange
  OnFinished on_finished{};
};

// Sends nothing; blocks only where ranks share memory.
std::shared_ptr<Exchange> exchange_in_buckets(World world, const NamedTensors& parameters,
                                              const DistributedDataParallelOptions& options = {},
                                              const BucketPlan& plan = {});

}  // namespace lockstep
