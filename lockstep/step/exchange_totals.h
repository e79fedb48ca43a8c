// SPDX-License-Identifier: Apache-2.0
// step/exchange_totals.h: what the ranks sum up in every exchange through buckets beside the gradients: samples and
// loss; whether one was asked to stop; and whether they all agree on what a step is.
//
// Flow:    buckets.cc -> here -> World::all_reduce
// Owns:    a tensor of ten numbers, and two for each rank: how it counts (step/accumulated_batches.h)
// Threads: one thread
// Ranks:   all, in every exchange
//
// Note [Equal on all ranks, by a sum]
// N numbers are equal if and only if N times the sum of their squares is the square of their sum. So one all-reduce, which is
// needed for the samples anyway, also compares settings: it sums the halves of their hash, and the squares of these. Sums of
// whole numbers below 2^53 are exact in any order. N ranks send 80 + 16 N bytes. Only if they differ the settings themselves
// are gathered, to name the one.
#pragma once

#include <torch/types.h>

#include <cstdint>
#include <limits>
#include <optional>
#include <vector>

#include "lockstep/base/process/stop.h"
#include "lockstep/batch_totals.h"
#include "lockstep/collective/gpus.h"
#include "lockstep/error.h"
#include "lockstep/step/accumulated_batches.h"
#include "lockstep/step/step_agreement.h"
#include "lockstep/world.h"

namespace lockstep {

class ExchangeTotals {
 public:
  explicit ExchangeTotals(World world) : world_(std::move(world)) {
    if (!world_.device().is_cpu()) from_gpu_.emplace(world_.device());
  }

  // Starts the sum, on the device of the world: a GPU has it as soon as it has the loss, before it computes any gradient. Does not
  // block.
  void start(const AccumulatedBatches& batches, StepSettings settings) {
    settings_ = std::move(settings);
    const double counting = batches.samples > 0 && batches.leading == 0 ? 1 : 0, backwards = batches.backwards;
    const double plain = batches.is_plain ? 1 : 0, none = counting > 0 ? 0 : std::numeric_limits<double>::quiet_NaN();
    std::vector<double> own{batches.samples, counting, wants_to_stop() ? 1.0 : 0.0};
    const uint64_t hash = hash_of(settings_);
    for (const double number : {counting * (2 * backwards + plain), static_cast<double>(hash & 0xffff),
                                static_cast<double>(hash >> 16 & 0xffff)})
      own.insert(own.end(), {number, number * number});
    const auto [kinds, size] = batches.weight_of_rank;
    for (int rank = 0; rank < world_.size(); ++rank)
      own.insert(own.end(), {rank == world_.rank() ? kinds : 0.0, rank == world_.rank() ? size : 0});
    settings_.insert(settings_.begin(), {{kBackwards, backwards + none}, {kPlain, plain + none}});
    own.push_back(batches.loss_here);
    sums_ = torch::tensor(own, torch::kFloat64).to(world_.device(), /*non_blocking=*/true);
    if (batches.loss_on_gpu.defined()) sums_[-1].copy_(batches.loss_there());  // forward may still run
    work_.emplace(world_.all_reduce_async(sums_));
    if (from_gpu_) from_gpu_->start(sums_, *work_);
  }

  // Returns the samples of all ranks. Blocks; compares nothing. Throws PeerLost.
  int64_t samples() { return static_cast<int64_t>(sums()[kSamples].item<double>()); }

  // The number of backward() calls of the ranks whose first batches were not empty; none: there is no such rank, or they
  // differ, as wait() will say. Blocks. Throws PeerLost.
  std::optional<uint32_t> backwards() {
    const torch::Tensor sums = this->sums();
    const auto* sum = sums.const_data_ptr<double>();
    if (sum[kCounting] == 0 || !are_equal(sum[kCounting], sum + kCalls)) return std::nullopt;
    return static_cast<uint32_t>(sum[kCalls] / sum[kCounting] / 2);
  }

  // Blocks. Throws MismatchError on all ranks: other settings, or backward() called another number of times since the
  // last exchange, or loss.backward() on some of them only; PeerLost.
  BatchTotals wait() {
    const torch::Tensor sums = this->sums();
    const auto* sum = sums.const_data_ptr<double>();
    const int64_t loss = sums.numel() - 1;
    if (!are_equal(sum[kCounting], sum + kCalls) || !are_equal(world_.size(), sum + kLowHash) ||
        !are_equal(world_.size(), sum + kHighHash))
      throw_difference();
    std::vector<RankWeight> weights;
    for (const double* at = sum + kWeights; at < sum + loss; at += 2)
      weights.push_back({static_cast<uint32_t>(at[0]), at[1]});
    const double ranks_alike = compare_weights(weights, world_.rank());
    divisor_ = ranks_alike > 0 ? ranks_alike : sum[kSamples];
    if (sum[kStop] > 0) agree_to_stop();
    return {static_cast<int64_t>(sum[kSamples]), sum[loss] / sum[kSamples]};
  }

  // After wait(): the sum of all gradients divided by it is their mean.
  double divisor() const { return divisor_; }

 private:
  // Places of the numbers; behind them stand how each rank counts, and the loss. A square stands behind its number.
  // Calls: twice the number of backward(), and 1 more for loss.backward(), of the ranks that count.
  enum Sum : uint8_t {
    kSamples,
    kCounting,
    kStop,
    kCalls,
    kLowHash = kCalls + 2,
    kHighHash = kLowHash + 2,
    kWeights = kHighHash + 2
  };

  // Compared for ranks that count: those whose first batches were not empty. The others may have missed a zero_grad().
  static constexpr const char* kBackwards = "the number of backward() since the last exchange";
  static constexpr const char* kPlain = "loss.backward() instead of ddp.backward()";

  // Returns whether the `count` numbers with this sum, and the sum of squares behind it, are equal.
  static bool are_equal(double count, const double* sum) {
    const auto whole = [](double number) { return static_cast<uint64_t>(number); };
    return whole(count) * whole(sum[1]) == whole(sum[0]) * whole(sum[0]);
  }

  torch::Tensor sums() {
    if (from_gpu_) return from_gpu_->wait(world_.timeout());
    if (work_) work_->wait();
    work_.reset();
    return sums_;
  }

  // All ranks come here, as all have the same sums. Each compares what all have set with what it has set itself.
  [[noreturn]] void throw_difference() const {
    std::vector<double> own{static_cast<double>(settings_.size())};  // other ranks may have another number of them
    for (const StepSetting& setting : settings_) own.push_back(setting.value);
    const torch::Tensor all = world_.all_gather_rows(torch::tensor(own, torch::kFloat64).to(world_.device())).cpu();
    const auto* theirs = all.const_data_ptr<double>();
    for (int rank = 0; rank < world_.size(); ++rank) {
      const auto count = static_cast<size_t>(*theirs++);
      require_same_settings(settings_, world_.rank(), {theirs, count}, rank, "the ranks differ", world_.describe());
      theirs += count;
    }
    throw MismatchError({.what = "other ranks make different step() calls",
                         .here = world_.describe(),
                         .likely = "a step(), backward() or setting that depends on the rank",
                         .next = "see the errors of the other ranks"});
  }

  World world_;
  StepSettings settings_;
  torch::Tensor sums_;
  double divisor_ = 0;
  std::optional<Work> work_;                 // until it was waited for
  std::optional<NumbersOnTheWay> from_gpu_;  // of a GPU
};

}  // namespace lockstep
