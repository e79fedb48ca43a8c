// SPDX-License-Identifier: Apache-2.0
// gradient/reducer.h: packs gradients into flat buckets and all-reduces each one while backward() still runs.
//
// Flow:    model/ -> autograd calls our hooks -> buckets -> collective/ -> the parameters' .grad -> optimizer/
// Owns:    its buckets (one more copy of the gradients) and its hooks; the parameters stay the module's
// Threads: hooks run on autograd's threads, one at a time; call everything else from one thread
// Ranks:   every rank constructs it with the same parameters, and makes the same calls in the same order
//
// The result is the mean over all samples: sum_j (m_j / n) grad_j over ranks j with m_j samples each, n = sum_j m_j.
//
// Note [A step through buckets]
//   begin()   starts to all-reduce (m_j, m_j loss_j) and what shows that all ranks agree (gradient/exchange_totals.h)
//   hooks     a gradient is ready: times m_j / s into its bucket. A bucket is full, and all before it are sent: its
//             all-reduce starts
//   finish()  sends the buckets that never filled; waits for all; puts s / n times the sums into .grad
// n is not known while backward() runs, and waiting for it would put a round trip before the first gradient. So
// gradients are scaled by s, which every rank knows already: the largest power of two that is at most n of the previous
// step. It keeps small dtypes from overflowing.
//
// Note [Unused parameters]
// A parameter that took no part on some ranks counts as zero there. Besides its gradients a bucket carries one flag per
// parameter, so that one that took no part on any rank keeps an undefined .grad, as it does on a single rank. Such
// parameters would hold their buckets back until the end of backward(); so once a step has left some out, begin() walks
// the graph and packs at once those that this backward() will not reach.
//
// Note [Slices]
// With slices a bucket is reduce-scattered: each rank gets the mean of its slice (gradient/gradient_slices.h), and .grad stays its
// own. So backward() can't add to what was exchanged, as it can to a mean, and a plain loss.backward(), which does not say when
// it begins, is refused.
#pragma once

#include <torch/types.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "lockstep/batch_totals.h"
#include "lockstep/batch_weight.h"
#include "lockstep/communication_hook.h"
#include "lockstep/gradient/gradient_slices.h"
#include "lockstep/gradient/step_agreement.h"
#include "lockstep/model/parameters.h"
#include "lockstep/world.h"

namespace lockstep {

struct ReducerOptions {
  std::size_t bucket_bytes = kBucketBytes;
  std::shared_ptr<CommunicationHook> hook = nullptr;  // how a bucket is summed; none: all-reduced as it is
  Algorithm algorithm = Algorithm::kDirect;           // of that all-reduce

  // Every step uses the same parameters as the first, and each gradient becomes ready as often as in the first: more
  // than once if backward() contains another backward() (activation checkpointing). The first exchange then begins when
  // backward() is over.
  bool static_graph = false;

  // After an exchange .grad is a view of the bucket, which saves one copy of the gradients as long as gradients are
  // zeroed in place.
  bool gradient_as_bucket_view = false;

  // Parameters whose gradients have few rows, as an embedding's: exchanged after backward(), without a hook.
  std::set<std::string> sparse{};

  // Each rank gets the mean of its slice only. Without a hook, an algorithm or sparse gradients.
  bool slices = false;

  // What every rank must have alike at the beginning of each exchange.
  std::function<StepSettings()> settings{};
};

struct ReducerStatistics {      // since the start, on this rank
  std::int64_t bytes = 0;       // of gradients given into collectives or a hook
  double exchange_seconds = 0;  // from sending the first bucket of a step until all are back
};

class Reducer {
 public:
  using OnFinished = std::function<void(const BatchTotals&)>;

  // Parameters are put into buckets in reverse order, the order in which backward() tends to reach them; after the first
  // exchange in the order in which those of rank 0 became ready. `on_finished` is called at the end of each finish(),
  // also of the one at the end of a plain loss.backward(). Sends nothing.
  Reducer(World world, const std::vector<NamedTensor>& parameters, const ReducerOptions& options = {},
          OnFinished on_finished = {});
  ~Reducer();
  Reducer(const Reducer&) = delete;
  Reducer& operator=(const Reducer&) = delete;

  // Before backward(): this rank's number of samples and mean loss. Without samples or without a loss, which is then not
  // known, also inside of the backward(), before the first gradient of a parameter. Returns the factor by which its
  // gradients must be multiplied, 0 without samples. Blocks only in the first step, to learn s. Throws UsageError after a
  // backward() that failed: the ranks no longer agree on what was exchanged.
  double begin(const BatchWeight& batch, const torch::Tensor& loss = {});

  // After that backward(): blocks until every .grad is the mean. Sends 2(N-1)/N * K in all. Throws PeerLost.
  BatchTotals finish();

  // Instead of both, around a backward() whose gradients add to .grad until a later one exchanges the sum. Send nothing.
  double begin_accumulating(const BatchWeight& batch, const torch::Tensor& loss = {});
  void end_accumulating();

  // Instead of the second, if backward() failed: no other may come after it, and the other ranks get PeerLost with
  // `reason`. A plain loss.backward() that fails does the same.
  void cancel(const std::string& reason);

  const ReducerStatistics& statistics() const;

  std::shared_ptr<GradientSlices> slices() const;  // null: .grad is the mean

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace lockstep
