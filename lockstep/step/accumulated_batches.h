// SPDX-License-Identifier: Apache-2.0
// step/accumulated_batches.h: counts the batches whose gradients add up in one rank's .grad, so that the mean over all
// ranks is exact for batches of different sizes.
//
// Threads: a value
// Ranks:   no communication; each rank counts its own
#pragma once

#include <torch/types.h>

#include <cmath>
#include <cstdint>
#include <span>
#include <string>
#include <utility>

#include "lockstep/base/text.h"
#include "lockstep/batch_totals.h"
#include "lockstep/error.h"

namespace lockstep {

// How the batches of a rank count.
struct RankWeight {
  uint32_t kinds = BatchWeight::kNone;  // bits of BatchWeight::Kind
  double size = 0;                      // sum of BatchWeight::size

  bool has(BatchWeight::Kind kind) const { return (kinds & kind) != 0; }
  void add(const BatchWeight& batch) { *this = {kinds | batch.kind, size + batch.size}; }
};

// T calls of backward() since the last exchange, the t-th over m_t samples. Each adds the gradient of a mean, so the
// t-th is scaled by m_t / unit. .grad is then the gradient of (sum_t m_t loss_t) / unit: the sum over ranks of
// unit * .grad, divided by the samples of all ranks, is the mean over all samples. Where ranks count alike, each is one
// sample, however often it calls backward(), and the result is the sum of .grad over ranks divided by their number.
struct BatchCounts {
  double samples = 0;         // sum of m_t
  double unit = 0;            // m_1; 0: no samples yet
  uint32_t backwards = 0;     // T
  uint32_t leading = 0;       // of these, those before the first with samples
  RankWeight weight_of_rank;  // of the batches since the first with samples; until then of the last one
  bool is_plain = false;      // counted by add_unknown()
};

struct AccumulatedBatches : BatchCounts {
  double loss_here = 0;       // sum of m_t loss_t on the CPU; NaN: one is not known
  torch::Tensor loss_on_gpu;  // of the others, in float64

  // Counts a backward() that is about to run; loss: undefined where it is not known. Returns the factor m_t / unit of its
  // gradients, 0 without samples.
  double add(const BatchWeight& batch, const torch::Tensor& loss = {}) {
    ++backwards;
    if (samples == 0) weight_of_rank = {};
    weight_of_rank.add(batch);
    if (batch.samples == 0 && samples == 0) ++leading;
    if (batch.samples == 0) return 0;
    const auto count = static_cast<double>(batch.samples);
    if (unit == 0) unit = count;
    if (samples == 0 || !is_alike()) samples += count;
    if (loss.defined() && !loss.is_cpu()) {
      const torch::Tensor known = loss.detach().to(torch::kFloat64) * count;
      loss_on_gpu = loss_on_gpu.defined() ? loss_on_gpu + known : known;
    } else {
      loss_here += loss.defined() && loss.numel() == 1 ? loss.item<double>() * count : NAN;
    }
    return count / unit;
  }

  // Counts a plain loss.backward(), whose batch size is not known: every rank counts as one sample.
  void add_unknown() {
    add(BatchWeight::kAlike);
    weight_of_rank = {};
    is_plain = true;
  }

  // The factor of this rank's .grad in the sum over ranks, before division by all ranks' samples. Over T backward() the
  // result is the sum of their means, as in PyTorch.
  double weight() const { return weight(backwards); }
  double weight(uint32_t times) const { return is_alike() ? 1 : unit * times; }
  bool is_alike() const { return weight_of_rank.has(BatchWeight::kAlike); }

  // Waits for no GPU.
  torch::Tensor loss_there() const {
    if (!loss_on_gpu.defined()) return torch::full({}, loss_here, torch::kFloat64);
    return loss_here == 0 ? loss_on_gpu : loss_on_gpu + loss_here;
  }
  double loss() const { return loss_on_gpu.defined() ? loss_there().item<double>() : loss_here; }
};

// Compares how the ranks' batches count in one exchange; all ranks call it with the same values. Returns the number of
// ranks that the sum of gradients is divided by; 0: they count by samples. Throws MismatchError if some count by
// samples and others alike. Warns if ranks count alike and their sizes differ: on the first of them, once in a process.
double compare_weights(std::span<const RankWeight> ranks, int rank);

// loss.backward() whose gradients are multiplied by `factor`.
inline void run_backward(const torch::Tensor& loss, double factor) {
  loss.backward(factor == 1 ? torch::Tensor() : torch::full_like(loss, factor));
}

inline UsageError too_many_backwards(size_t shards, std::string here = {}) {
  return UsageError({.what = concat("more than ", shards, " backward() in a step with as many shards on this rank"),
                     .here = std::move(here),
                     .next = "call step() after the last shard"});
}

// call: what comes now.
inline UsageError after_failed_backward(std::string here = {}, std::string call = "backward() was called after one") {
  return UsageError({.what = std::move(call) + " that failed half-way",
                     .here = std::move(here),
                     .likely = "an exception in backward() that was caught and ignored",
                     .next = "let it end the program, and go on from a checkpoint"});
}

}  // namespace lockstep
