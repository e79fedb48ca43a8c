// SPDX-License-Identifier: Apache-2.0
// gradient/shared_gradients.h: the exchange of gradients between ranks that share memory. No gradient is sent: each
// rank publishes where its gradients are, and whoever updates a slice of the parameters reads that slice of all of them.
//
// Flow:    backward() -> GradientMemory -> finish(): a table of places, one barrier -> begin_update() -> optimizer/
// Owns:    its table, and copies of the gradients that are not in memory that the other ranks can read
// Threads: one thread
// Ranks:   the ranks of one machine construct it with the same parameters and make the same calls in the same order
//
// The result is the mean over all samples: sum_j (m_j / n) grad_j over ranks j with m_j samples each, n = sum_j m_j.
// Several backward() add up until zero_grad(), as in PyTorch: T of them give T times the mean over all their samples.
//
// Note [One step, three barriers]
//   finish()        writes this rank's rows of the table, then barrier 1: every gradient of the machine is computed and
//                   published, and no rank reads the parameters any more
//   begin_update()  barrier 2: all ranks are about to make the same step, with the same settings. Then it reads the
//                   other ranks' rows
//   end_update()    barrier 3: every slice is updated, and no rank reads gradients any more
// finish() may be called again without a step() in between, while another rank still reads the previous rows: so there
// are two tables, used alternately. A rank that writes table k % 2 has passed barrier 1 of exchange k-1; all ranks were
// there, so all have finished reading exchange k-2.
#pragma once

#include <torch/types.h>

#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

#include "lockstep/base/page_guard.h"
#include "lockstep/batch_totals.h"
#include "lockstep/gradient/accumulated_batches.h"
#include "lockstep/gradient/gradient_memory.h"
#include "lockstep/gradient/gradient_source.h"
#include "lockstep/gradient/gradient_watch.h"
#include "lockstep/model/parameter_block.h"

namespace lockstep {

struct SharedGradientsOptions {
  std::shared_ptr<ParameterBlock> block = nullptr;  // checked before and marked after each step, where there is one

  // Number of backward() per step on this rank whose gradients are kept apart: the virtual shards of
  // docs/design/fused-step.md. 0: the gradients of all backward() of a step add up.
  int shards = 0;

  // Those whose .grad zero_grad() drops: the optimizer's. Empty: all.
  std::vector<NamedTensor> updated{};

  // Called at the end of each exchange: of finish(), or in begin_update() after a plain loss.backward(), where .grad is
  // published as it is, and every rank counts as one sample.
  std::function<void(const BatchTotals&)> on_finished{};
};

class SharedGradients : public GradientSource {
 public:
  // Blocks. Throws SystemError, PeerLost.
  SharedGradients(std::shared_ptr<SharedMemory> memory, std::vector<NamedTensor> parameters,
                  SharedGradientsOptions options = {});
  ~SharedGradients() override;

  // Around a backward(), which then leaves the gradients where the other ranks can read them. begin() on the thread that
  // runs it, before the first gradient of a parameter. loss: the mean over `samples` samples of this rank; undefined: not
  // known. Returns the factor by which its gradients must be multiplied, 0 without samples. end() after the last one;
  // exchanges: finish() follows. Neither sends anything or blocks.
  double begin(const BatchWeight& batch, const torch::Tensor& loss = {});
  void end(bool exchanges = true);

  // Instead of end(), if backward() failed: no other may come after it, and the other ranks get PeerLost with `reason`.
  void cancel(const std::string& reason);

  // Forgets what was counted since the last zero_grad() or step(): no rank had samples, and there is no step().
  void drop();

  // Publishes the gradients of the backward() since the last zero_grad(). Blocks until all ranks have published. Returns
  // the samples and mean loss of these backward() over all ranks. Throws PeerLost; MismatchError on all ranks: some of
  // them are in a step() instead.
  BatchTotals finish() { return exchange(/*in_step=*/false); }

  const std::shared_ptr<SharedMemory>& memory() const override { return memory_; }
  std::size_t kept_sources() const override;
  WeightedGradients begin_update(const std::vector<torch::Tensor>& parameters, const StepSettings& settings) override;
  void end_update() override;

 private:
  class Table;
  // What this rank computed since the last step, or one shard of it.
  struct Source {
    AccumulatedBatches batches;
    std::vector<torch::Tensor> gradients;  // of each parameter
  };

  BatchTotals exchange(bool in_step);
  Source& current_source();
  bool forget_dropped_gradients();
  void require_only_counted_gradients(std::int64_t samples) const;
  void count_what_step_finds();
  void take_grads(Source& source) const;
  void publish(std::size_t source, bool in_step);
  void require_same_calls() const;
  BatchTotals totals();
  std::uint64_t place_for_peers(std::size_t source, std::size_t parameter);
  void protect_gradients();
  void require_unchanged_grads() const;
  std::vector<double> weights() const;
  double backwards_per_step() const;

  std::shared_ptr<SharedMemory> memory_;
  std::vector<NamedTensor> parameters_;
  SharedGradientsOptions options_;
  std::unordered_map<const void*, std::size_t> index_of_;  // TensorImpl -> index in parameters_
  GradientMemory gradient_memory_;
  std::optional<GradientMemory::Scope> scope_;  // between begin() and end()
  Source* begun_ = nullptr;                     // by begin()
  std::vector<Source> sources_;
  std::list<PageGuard> guards_;            // of published gradients, with LOCKSTEP_CHECK
  std::vector<SharedMemory::Own> copies_;  // [source][parameter]
  std::unique_ptr<Table> table_;
  bool is_published_ = false;  // since the last step
  bool has_stepped_ = false;   // since the last exchange or backward()
  GradientWatch watch_;        // since then
  StepAgreement agreement_;
  double ranks_alike_ = 0;  // of the last exchange, by compare_weights()
  bool failed_ = false;
};

}  // namespace lockstep
