// gradient/batch_totals.h: what is counted of a batch: on one rank while gradients add up, and over all ranks
// afterwards.
//
// Threads: values
// Ranks:   BatchTotals are the same on every rank
#pragma once

#include <torch/types.h>

#include <cstdint>
#include <limits>

namespace lockstep {

struct BatchTotals {
  std::int64_t samples = 0;  // over all ranks
  double mean_loss = 0;      // weighted by samples; NaN where the loss is not known
};

// What one rank has added up in its .grad since the last exchange: T backward(), over m_t samples each. Every one is
// the gradient of a mean; so that their sum over t and over ranks is exact for uneven m_t, the t-th counts m_t / unit
// times, and the sum is then in units of `unit` samples.
struct LocalBatch {
  double samples = 0;           // sum of m_t
  torch::Tensor weighted_loss;  // sum of m_t loss_t: a float64 scalar where the loss is; undefined: not known
  double unit = 0;              // m_1; 0: no samples yet
  std::int64_t backwards = 0;   // T

  // Counts a backward() that is about to run. Returns what to run it with: loss.backward(that).
  torch::Tensor add(std::int64_t more, const torch::Tensor& loss) {
    ++backwards;
    if (more == 0) return {};
    const auto count = static_cast<double>(more);
    if (unit == 0) unit = count;
    samples += count;
    const torch::Tensor known = loss.detach().to(torch::kFloat64) * count;
    weighted_loss = weighted_loss.defined() ? weighted_loss + known : known;
    return count == unit ? torch::Tensor() : torch::full_like(loss, count / unit);
  }

  // A plain loss.backward(): every rank counts as one sample.
  void add_unknown() {
    ++backwards;
    unit = 1;
    samples += 1;
    weighted_loss = torch::full({}, std::numeric_limits<double>::quiet_NaN(), torch::kFloat64);
  }

  // This rank's factor in the sum over ranks: divided by all ranks' samples it makes .grad's share of the mean; over T
  // backward() the result is the sum of their means, as in PyTorch.
  double weight() const { return unit * static_cast<double>(backwards); }

  double loss() const { return weighted_loss.defined() ? weighted_loss.item<double>() : 0; }
};

}  // namespace lockstep
