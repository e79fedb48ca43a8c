// SPDX-License-Identifier: Apache-2.0
#include "lockstep/gradient/exchange_totals.h"

#include <algorithm>
#include <limits>

#include "lockstep/base/stop.h"
#include "lockstep/base/to_size.h"
#include "lockstep/collective/world_state.h"
#include "lockstep/error.h"

namespace lockstep {
namespace {

// Where each number is.
// kCalls: twice the number of backward(), and 1 more for loss.backward().
enum Sum : std::uint8_t {
  kSamples,
  kCounting,
  kCalls,
  kCallsSquared,
  kLow,
  kLowSquared,
  kHigh,
  kHighSquared,
  kStop,
  kLoss,
  kWeights
};

constexpr std::size_t kGathered = 128;  // settings that can be named

// Not of ranks whose first batches were empty: what they counted the others may have dropped since.
const char* const kBackwards = "the number of backward() since the last exchange";
const char* const kPlain = "loss.backward() instead of ddp.backward()";

bool equal(double ranks, double sum, double sum_of_squares) { return ranks * sum_of_squares == sum * sum; }

}  // namespace

void ExchangeTotals::start(const AccumulatedBatches& batches, StepSettings settings) {
  settings_ = std::move(settings);
  const std::uint64_t hash = hash_of(settings_);
  const auto low = static_cast<double>(hash & 0xffff), high = static_cast<double>(hash >> 16 & 0xffff);
  const double counting = batches.samples > 0 && batches.leading == 0 ? 1 : 0;
  const auto backwards = static_cast<double>(batches.backwards);
  const double plain = batches.is_plain ? 1 : 0, none = counting > 0 ? 0 : std::numeric_limits<double>::quiet_NaN();
  const double calls = counting * (2 * backwards + plain);
  settings_.insert(settings_.begin(), {{kBackwards, backwards + none}, {kPlain, plain + none}});
  const auto options = torch::TensorOptions().dtype(torch::kFloat64).device(world_.device());
  const torch::Tensor loss =
      batches.weighted_loss.defined() ? batches.weighted_loss.reshape({1}).to(options) : torch::zeros({1}, options);
  const torch::Tensor others = torch::tensor(
      {batches.samples, counting, calls, calls * calls, low, low * low, high, high * high, wants_to_stop() ? 1.0 : 0.0},
      torch::kFloat64);
  std::vector<RankWeight> weights(to_size(world_.size()));  // of the others zeros
  weights[to_size(world_.rank())] = batches.weight_of_rank;
  const torch::Tensor numbers = torch::from_blob(weights.data(), {2 * world_.size()}, torch::kFloat64);
  sums_ = torch::cat({others.to(world_.device(), /*non_blocking=*/true), loss,  // forward may still run on a GPU
                      numbers.to(world_.device())});
  work_.emplace(world_.all_reduce_async(sums_));
}

torch::Tensor ExchangeTotals::sums() {
  if (work_) work_->wait();
  work_.reset();
  WorldState::wait_for_device(world_);
  return sums_.cpu();
}

std::int64_t ExchangeTotals::samples() { return static_cast<std::int64_t>(sums()[kSamples].item<double>()); }

std::optional<std::int64_t> ExchangeTotals::backwards() {
  const torch::Tensor sums = this->sums();
  const auto* sum = sums.const_data_ptr<double>();
  if (sum[kCounting] == 0 || !equal(sum[kCounting], sum[kCalls], sum[kCallsSquared])) return std::nullopt;
  return static_cast<std::int64_t>(sum[kCalls] / sum[kCounting]) / 2;
}

BatchTotals ExchangeTotals::wait() {
  const torch::Tensor sums = this->sums();
  const auto* sum = sums.const_data_ptr<double>();
  if (!equal(world_.size(), sum[kLow], sum[kLowSquared]) || !equal(world_.size(), sum[kHigh], sum[kHighSquared]) ||
      !equal(sum[kCounting], sum[kCalls], sum[kCallsSquared]))
    throw_difference();
  const auto* weights = reinterpret_cast<const RankWeight*>(sum + kWeights);
  const double ranks_alike = compare_weights({weights, to_size(world_.size())}, world_.rank());
  divisor_ = ranks_alike > 0 ? ranks_alike : sum[kSamples];
  if (sum[kStop] > 0) agree_to_stop();
  return {static_cast<std::int64_t>(sum[kSamples]), sum[kLoss] / sum[kSamples]};
}

// All ranks come here, as all have the same sums. Each compares what all have set with what it has set itself.
void ExchangeTotals::throw_difference() const {
  std::vector<double> own(kGathered, 0);
  for (std::size_t i = 0; i < std::min(settings_.size(), own.size()); ++i) own[i] = settings_[i].value;
  const torch::Tensor all = world_.all_gather(torch::tensor(own, torch::kFloat64).to(world_.device())).cpu();
  const auto* theirs = all.const_data_ptr<double>();
  for (int rank = 0; rank < world_.size(); ++rank, theirs += own.size())
    require_same_settings(settings_, world_.rank(), {theirs, own.size()}, rank, "the ranks differ", world_.describe());
  throw MismatchError({.what = "other ranks differ from one another in what a step() is",
                       .here = world_.describe(),
                       .likely = "a step(), backward() or setting that depends on the rank",
                       .next = "see the errors of the other ranks"});
}

}  // namespace lockstep
