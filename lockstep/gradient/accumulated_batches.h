// SPDX-License-Identifier: Apache-2.0
// gradient/accumulated_batches.h: what one rank counts of the batches whose gradients add up in its .grad, so that the
// mean over all ranks is exact for batches of different sizes.
//
// Threads: a value
// Ranks:   no communication; each rank counts its own
#pragma once

#include <torch/types.h>

#include <cstdint>
#include <limits>
#include <string>
#include <utility>

#include "lockstep/error.h"
#include "lockstep/gradient/rank_weights.h"

namespace lockstep {

// T calls of backward() since the last exchange, the t-th over m_t samples. Each adds the gradient of a mean, so the
// t-th is scaled by m_t / unit. .grad is then the gradient of (sum_t m_t loss_t) / unit: the sum over ranks of
// unit * .grad, divided by the samples of all ranks, is the mean over all samples. Where ranks count alike, each is one
// sample, however often it calls backward(), and the result is the sum of .grad over ranks divided by their number.
struct AccumulatedBatches {
  double samples = 0;           // sum of m_t
  torch::Tensor weighted_loss;  // sum of m_t loss_t: a float64 scalar on the loss's device; undefined: not known
  double unit = 0;              // m_1; 0: no samples yet
  std::int64_t backwards = 0;   // T
  std::int64_t leading = 0;     // of these, those before the first with samples
  bool is_plain = false;        // counted by add_unknown()
  RankWeight weight_of_rank;    // of the batches since the first with samples; until then of the last one

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
    const torch::Tensor known = loss.defined() ? loss.detach().to(torch::kFloat64) * count : unknown_loss();
    weighted_loss = weighted_loss.defined() ? weighted_loss + known : known;
    return count / unit;
  }

  // Counts a plain loss.backward(), whose batch size is not known: every rank counts as one sample.
  void add_unknown() {
    add(BatchWeight::kAlike);
    weight_of_rank = {};
    is_plain = true;
  }

  static torch::Tensor unknown_loss() {
    return torch::full({}, std::numeric_limits<double>::quiet_NaN(), torch::kFloat64);
  }

  // The factor of this rank's .grad in the sum over ranks, before division by all ranks' samples. Over T backward() the
  // result is the sum of their means, as in PyTorch.
  double weight() const { return weight(backwards); }
  double weight(std::int64_t times) const { return is_alike() ? 1 : unit * static_cast<double>(times); }
  bool is_alike() const { return weight_of_rank.has(BatchWeight::kAlike); }

  double loss() const { return weighted_loss.defined() ? weighted_loss.item<double>() : 0; }
};

// loss.backward() whose gradients are multiplied by `factor`.
inline void run_backward(const torch::Tensor& loss, double factor) {
  loss.backward(factor == 1 ? torch::Tensor() : torch::full_like(loss, factor));
}

inline UsageError after_other_backward(std::string here) {
  return UsageError({.what = "loss.backward() was called after ddp.backward() under no_sync()",
                     .here = std::move(here),
                     .likely = "both kinds of backward() in one step: it is not known how many samples each rank has",
                     .next = "use one of the two kinds in a step"});
}

// call: what comes now.
inline UsageError after_failed_backward(std::string here = {}, std::string call = "backward() was called after one") {
  return UsageError({.what = std::move(call) + " that failed half-way",
                     .here = std::move(here),
                     .likely = "an exception in backward() that was caught and ignored",
                     .next = "let it end the program, and go on from a checkpoint"});
}

}  // namespace lockstep
