// SPDX-License-Identifier: Apache-2.0
#include "lockstep/gradient/exchange_totals.h"

#include <algorithm>

#include "lockstep/base/text.h"
#include "lockstep/error.h"

namespace lockstep {
namespace {

// Where each number is.
enum Sum : std::uint8_t { kSamples, kCounting, kCalls, kCallsSquared, kLow, kLowSquared, kHigh, kHighSquared, kLoss };

constexpr std::int64_t kGathered = 128;  // settings that can be named

// Not of ranks whose first batches were empty: what they counted the others may have dropped since.
const char* const kBackwards = "the number of backward() since the last exchange";

bool equal(double ranks, double sum, double sum_of_squares) { return ranks * sum_of_squares == sum * sum; }

}  // namespace

void ExchangeTotals::start(const AccumulatedBatches& batches, StepSettings settings) {
  settings_ = std::move(settings);
  const std::uint64_t hash = hash_of(settings_);
  const auto low = static_cast<double>(hash & 0xffff), high = static_cast<double>(hash >> 16 & 0xffff);
  const double counting = batches.samples > 0 && batches.leading == 0 ? 1 : 0;
  const double calls = counting * static_cast<double>(batches.backwards);
  if (counting > 0) settings_[kBackwards] = calls;
  const auto options = torch::TensorOptions().dtype(torch::kFloat64).device(world_.device());
  const torch::Tensor loss =
      batches.weighted_loss.defined() ? batches.weighted_loss.reshape({1}).to(options) : torch::zeros({1}, options);
  const torch::Tensor others = torch::tensor(
      {batches.samples, counting, calls, calls * calls, low, low * low, high, high * high}, torch::kFloat64);
  sums_ = torch::cat({others.to(world_.device()), loss});
  work_.emplace(world_.all_reduce_async(sums_));
}

BatchTotals ExchangeTotals::wait() {
  if (work_) work_->wait();
  work_.reset();
  const torch::Tensor sums = sums_.cpu();
  const auto* sum = sums.const_data_ptr<double>();
  if (!equal(world_.size(), sum[kLow], sum[kLowSquared]) || !equal(world_.size(), sum[kHigh], sum[kHighSquared]) ||
      !equal(sum[kCounting], sum[kCalls], sum[kCallsSquared]))
    throw_difference();
  return {static_cast<std::int64_t>(sum[kSamples]), sum[kLoss] / sum[kSamples]};
}

// All ranks come here, as all have the same sums. Each compares what all have set with what it has set itself.
void ExchangeTotals::throw_difference() const {
  std::vector<double> own(kGathered, 0);
  std::size_t i = 0;
  own[i++] = settings_.contains(kBackwards) ? settings_.at(kBackwards) : 0;
  for (const auto& [name, value] : settings_)
    if (name != kBackwards && i < own.size()) own[i++] = value;
  const torch::Tensor all = world_.all_gather(torch::tensor(own, torch::kFloat64).to(world_.device())).cpu();
  const auto* theirs = all.const_data_ptr<double>();
  const auto compare = [&](int rank, const std::string& name, std::size_t place) {
    const double other = theirs[static_cast<std::size_t>(rank) * own.size() + place];
    if (other == own[place] || (name == kBackwards && (other == 0 || own[place] == 0))) return;
    throw MismatchError({.what = concat("the ranks differ: ", name, " is ", own[place], " on rank ", world_.rank(),
                                        ", ", other, " on rank ", rank),
                         .here = world_.describe(),
                         .likely = "a step(), backward() or setting that depends on the rank",
                         .next = "let all ranks decide alike: all_reduce the condition first. After writing parameters "
                                 "by hand call parameters_written() on all ranks"});
  };
  for (int rank = 0; rank < world_.size(); ++rank) {
    compare(rank, kBackwards, 0);
    i = 1;
    for (const auto& [name, value] : settings_)
      if (name != kBackwards && i < own.size()) compare(rank, name, i++);
  }
  throw MismatchError({.what = "other ranks differ from one another in what a step() is",
                       .here = world_.describe(),
                       .likely = "a step(), backward() or setting that depends on the rank",
                       .next = "see the errors of the other ranks"});
}

}  // namespace lockstep
