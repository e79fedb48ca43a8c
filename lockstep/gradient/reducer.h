// gradient/reducer.h: packs gradients into flat buckets and all-reduces each one while backward() still runs.
//
// Flow:    model/ -> autograd calls our hooks -> buckets -> collective/ -> the parameters' .grad -> optimizer/
// Owns:    its buckets (one more copy of the gradients) and its hooks; the parameters stay the module's
// Threads: hooks run on autograd's threads, one at a time; call everything else from one thread
// Ranks:   every rank constructs it with the same parameters, and makes the same calls in the same order
//
// The result is S1's weighted mean  sum_j (m_j / n) grad_j  over ranks j with m_j samples each, n = sum_j m_j: exact for
// uneven parts. One step:
//   begin()   starts to all-reduce (m_j, m_j loss_j): 16 bytes
//   hooks     a gradient is ready: times m_j / s into its bucket. Bucket full, and those before it sent: all-reduce
//   finish()  buckets that never filled are sent too; waits; times s / n the sums go back into .grad
// n is not known while backward runs, and waiting for it would put a round trip before the first gradient. So gradients
// are scaled by what every rank knows already: s, the power of two below the last step's n. It keeps small dtypes from
// overflowing.
//
// Parameters that took no part on some ranks count as zero there. Beside its gradients a bucket carries one flag per
// parameter, so that one that took no part on any rank keeps an undefined .grad, as it does on a single rank. They
// would keep their buckets back until backward() is over; so once a step has left some out, begin() walks the graph
// and packs those first that this backward() will not reach.
#pragma once

#include <torch/types.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "lockstep/communication_hook.h"
#include "lockstep/batch_totals.h"
#include "lockstep/gradient/accumulated_batches.h"
#include "lockstep/model/parameters.h"
#include "lockstep/world.h"

namespace lockstep {

struct ReducerOptions {
  std::size_t bucket_bytes = std::size_t{25} << 20;   // Li et al., "PyTorch Distributed" (VLDB 2020)
  std::shared_ptr<CommunicationHook> hook = nullptr;  // how a bucket is summed; none: all-reduced as it is
  Algorithm algorithm = Algorithm::kDirect;           // of that all-reduce

  // Every step is like the first in which parameters take part and how often each gradient becomes ready, more than
  // once with a backward() inside of backward() (activation checkpointing). The first exchange then begins when
  // backward() is over.
  bool static_graph = false;

  // After an exchange .grad lies in the bucket: one copy of the gradients less, as long as gradients are zeroed in
  // place.
  bool gradient_as_bucket_view = false;

  std::set<std::string>
      sparse{};  // parameters with gradients of few rows (gradient/sparse_exchange.h): no hook, no overlap
};

struct ReducerStatistics {      // since the start, on this rank
  std::int64_t bytes = 0;       // of gradients given into collectives or a hook
  double exchange_seconds = 0;  // from sending the first bucket of a step until all are back
};

class Reducer {
 public:
  using OnFinished = std::function<void(const BatchTotals&)>;

  // Parameters are put into buckets in reverse order, the order in which backward() tends to reach them; after the
  // first exchange in the order in which rank 0's really became ready. `on_finished` is called at the end of each
  // finish(), also of the one that a plain loss.backward() makes by itself.
  Reducer(World world, const std::vector<NamedTensor>& parameters, const ReducerOptions& options = {},
          OnFinished on_finished = {});
  ~Reducer();
  Reducer(const Reducer&) = delete;
  Reducer& operator=(const Reducer&) = delete;

  // Before backward(): this rank's number of samples and mean loss. Returns what to run it with: loss.backward(that).
  // Blocks only in the first step, to learn s.
  // Throws UsageError after a backward() that failed: the ranks no longer agree on what was exchanged.
  torch::Tensor begin(std::int64_t samples, const torch::Tensor& loss);

  // Instead of begin(), for a backward() whose gradients only add up in .grad until a later one exchanges them all; no
  // finish() follows. Sends nothing. Call resume() after the backward(), also if it throws.
  torch::Tensor begin_without_exchange(std::int64_t samples, const torch::Tensor& loss);
  void resume();

  // After backward(): blocks until every .grad is the mean. Sends 2(N-1)/N * K in all.
  // Throws PeerLost.
  BatchTotals finish();

  const ReducerStatistics& statistics() const;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace lockstep
