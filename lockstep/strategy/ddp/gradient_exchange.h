// SPDX-License-Identifier: Apache-2.0
// strategy/ddp/gradient_exchange.h: how the gradients of a step get from every rank's backward() to the optimizer: two
// ways behind one interface.
//
//                  in shared memory                        through buckets
//   where          all ranks on one machine, which         everywhere else; with a communication hook or an algorithm
//                  share parameters                        by name
//   backward()     autograd writes into shared memory      full buckets are all-reduced while it runs
//   finish()       publishes places, one barrier           waits for the buckets
//   .grad          this rank's own                         the mean
//   step()         sums the gradients of all ranks         uses .grad
//
// Between GPUs a bucket may be reduce-scattered: .grad stays this rank's own, and step() uses the mean of the rank's slice
// (gradient/gradient_slices.h).
//
// Flow:    DistributedDataParallel -> here -> gradient/shared_gradients.h or gradient/reducer.h -> source()
// Owns:    memory for the exchange
// Threads: one thread
// Ranks:   every rank makes it at the same time and makes the same calls in the same order
#pragma once

#include <torch/types.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "lockstep/gradient/local_gradients.h"
#include "lockstep/gradient/reducer.h"
#include "lockstep/gradient/shared_gradients.h"
#include "lockstep/world.h"

namespace lockstep {

class GradientExchange {
 public:
  virtual ~GradientExchange() = default;

  // Around a backward(), which adds to .grad. begin() on the thread that runs it, before the first gradient of a
  // parameter. loss: the mean over the batch of this rank; undefined: not known. exchanges: finish() follows; else
  // a later backward() exchanges the sum. Returns the factor by which its gradients must be multiplied, 0 without samples.
  virtual double begin(const BatchWeight& batch, const torch::Tensor& loss, bool exchanges) = 0;
  virtual void end(bool exchanges) = 0;

  // Instead, if it failed: the other ranks get PeerLost with `reason` now and not at their deadline.
  virtual void cancel(const std::string& reason) = 0;

  // Blocks until the gradients of all ranks are there, then calls on_finished. Throws PeerLost.
  virtual void finish() = 0;

  // After a finish() that found no samples on any rank, at the end of join(): there is no step().
  virtual void drop() = 0;

  // Where an optimizer that updates shared parameters, or a slice of them, takes gradients from.
  virtual std::shared_ptr<GradientSource> source() = 0;

  virtual bool mean_in_grad() const = 0;  // between finish() and step()

  // Since the start, on this rank.
  virtual std::int64_t bytes() const = 0;  // of gradients given into collectives, or published
  virtual double seconds() const = 0;      // from the first bucket sent until all are back, or in finish()
};

std::unique_ptr<GradientExchange> exchange_in_shared_memory(std::shared_ptr<SharedMemory> memory,
                                                            std::vector<NamedTensor> parameters,
                                                            SharedGradientsOptions options);

// The Reducer leaves the mean in .grad. source: where the parameters are shared, else null.
std::unique_ptr<GradientExchange> exchange_through_buckets(std::unique_ptr<Reducer> reducer,
                                                           std::shared_ptr<LocalGradients> source);

}  // namespace lockstep
