// gradient/published_gradients.h: the exchange of gradients between ranks that share memory: nothing is sent. Every
// rank says where its gradients lie, and whoever updates a slice of the parameters reads that slice of all of them.
//
// Flow:    backward() -> GradientMemory -> finish(): a table of places, one barrier -> take() -> optimizer/
// Owns:    its table, and copies of the gradients that do not lie where peers can read them
// Threads: one thread
// Ranks:   the ranks of one machine construct it with the same parameters and make the same calls in the same order
//
// The result is S1's weighted mean over ranks j with m_j samples each, sum_j (m_j / n) grad_j. Several backward()
// before a step() add up, as in PyTorch: over T of them it is T times the mean over all their samples. Who leaves a
// step() out calls zero_grad(), which forgets them.
//
// Note [One step, two barriers]
//   finish()   writes the table, then waits for all: every gradient of the machine is computed, nobody reads parameters
//   take()     reads the peers' tables
//   updated()  waits for all: every slice is updated, nobody reads gradients any more
// A rank may finish() again without a step() in between, while a peer still reads the totals of the last one: so there
// are two tables, used in turn. Who writes table k has passed the barrier of k-1, so all are done with k-2.
#pragma once

#include <torch/types.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <unordered_map>
#include <vector>

#include "lockstep/batch_totals.h"
#include "lockstep/gradient/accumulated_batches.h"
#include "lockstep/gradient/gradient_memory.h"
#include "lockstep/gradient/step_gradients.h"
#include "lockstep/model/parameters.h"

namespace lockstep {

class PublishedGradients : public GradientSource {
 public:
  using OnFinished = std::function<void(const BatchTotals&)>;

  // on_finished is called at the end of each finish(), also of the one that step() makes after a plain loss.backward().
  // shards: how many backward() this rank makes per step whose gradients stay apart (docs/design/fused-step.md); 0:
  // all of a step add up. Blocks. Throws SystemError, PeerLost.
  PublishedGradients(std::shared_ptr<SharedMemory> memory, std::vector<NamedTensor> parameters, OnFinished on_finished,
                     int shards = 0);

  // Runs loss.backward() with gradients where peers can read them. loss: the mean over `samples` samples of this rank;
  // undefined with 0 samples. Sends nothing and does not block. Throws what backward() throws.
  void backward(const torch::Tensor& loss, std::int64_t samples);

  // Publishes what the backward() since the last step found; after a plain loss.backward(), .grad as it is. Blocks
  // until all ranks have. Returns what all have in common: the samples and the mean loss of these backward(). Throws
  // PeerLost.
  BatchTotals finish();

  const std::shared_ptr<SharedMemory>& memory() const override { return memory_; }
  StepGradients take(const std::vector<torch::Tensor>& parameters) override;
  void updated() override;

 private:
  // A source of gradients: what this rank computed since the last step, or one shard of it.
  struct Source {
    AccumulatedBatches batch;
    std::vector<torch::Tensor> gradients;  // of each parameter
  };
  struct Seen {
    const void* gradient;
    std::int64_t version;
  };
  struct Row;

  Source& current_source();
  void forget_dropped_gradients();
  void gather_gradients(Source& source);
  void keep_apart(Source& source);
  void publish(const Source& source, Row* row);
  std::uint64_t place_for_peers(std::size_t parameter, const torch::Tensor& gradient);
  void remember_gradients();
  void require_unchanged() const;
  Row* row(int turn, int rank, int source) const;
  BatchTotals read_totals();
  std::vector<double> weights() const;

  std::shared_ptr<SharedMemory> memory_;
  std::vector<NamedTensor> parameters_;
  OnFinished on_finished_;
  std::unordered_map<const void*, std::size_t> index_of_;  // TensorImpl -> number
  GradientMemory gradients_;
  bool keep_apart_;
  std::vector<Source> sources_;  // of this rank
  std::vector<SharedMemory::Own> copies_;
  std::shared_ptr<std::byte> tables_;  // two turns of a row per source of each rank
  std::int64_t finished_ = 0;          // calls of finish()
  bool published_ = false;             // since the last step
  std::vector<Seen> seen_;             // gradients as they were published
  bool failed_ = false;
};

}  // namespace lockstep
