// SPDX-License-Identifier: Apache-2.0
#include "lockstep/gradient/exchange_totals.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "lockstep/base/stop.h"
#include "lockstep/base/to_size.h"
#include "lockstep/collective/gpus.h"
#include "lockstep/error.h"

namespace lockstep {
namespace {

// Where each number is; after the bits of the calls those of the hash, how each rank counts, and the loss.
// Calls: twice the number of backward(), and 1 more for loss.backward(), of the ranks that count.
enum Sum : std::uint8_t { kSamples, kCounting, kStop, kCalls };
constexpr int kHashBits = 32;

// Not of ranks whose first batches were empty: what they counted the others may have dropped since.
const char* const kBackwards = "the number of backward() since the last exchange";
const char* const kPlain = "loss.backward() instead of ddp.backward()";

int digits_in_a_number(int ranks) { return static_cast<int>(53 / std::log2(ranks + 1.0)); }

void add_bits(std::uint64_t bits, int ranks, std::vector<double>& numbers) {
  const int digits = digits_in_a_number(ranks);
  for (int first = 0; first < kHashBits; first += digits) {
    double number = 0;
    for (int bit = std::min(first + digits, kHashBits) - 1; bit >= first; --bit)
      number = number * (ranks + 1.0) + static_cast<double>(bits >> bit & 1);
    numbers.push_back(number);
  }
}

// The bits that `having` of the ranks have, and the others none; none: they differ.
std::optional<std::uint64_t> common_bits(const double* sum, int ranks, double having) {
  const auto base = static_cast<std::uint64_t>(ranks) + 1;
  const int digits = digits_in_a_number(ranks);
  std::uint64_t bits = 0, left = 0;
  for (int bit = 0; bit < kHashBits; ++bit, left /= base) {
    if (bit % digits == 0) left = static_cast<std::uint64_t>(*sum++);
    if (left % base != 0 && static_cast<double>(left % base) != having) return std::nullopt;
    bits |= std::uint64_t{left % base != 0} << bit;
  }
  return bits;
}

}  // namespace

void ExchangeTotals::start(const AccumulatedBatches& batches, StepSettings settings) {
  settings_ = std::move(settings);
  const double counting = batches.samples > 0 && batches.leading == 0 ? 1 : 0;
  const auto backwards = static_cast<double>(batches.backwards);
  const double plain = batches.is_plain ? 1 : 0, none = counting > 0 ? 0 : std::numeric_limits<double>::quiet_NaN();
  std::vector<double> own{batches.samples, counting, wants_to_stop() ? 1.0 : 0.0};
  add_bits(static_cast<std::uint64_t>(counting * (2 * backwards + plain)), world_.size(), own);
  add_bits(hash_of(settings_), world_.size(), own);
  const auto [kinds, size] = batches.weight_of_rank;
  for (int rank = 0; rank < world_.size(); ++rank)
    own.insert(own.end(), {rank == world_.rank() ? kinds : 0, rank == world_.rank() ? size : 0});
  settings_.insert(settings_.begin(), {{kBackwards, backwards + none}, {kPlain, plain + none}});
  const auto options = torch::TensorOptions().dtype(torch::kFloat64).device(world_.device());
  const torch::Tensor loss =
      batches.weighted_loss.defined() ? batches.weighted_loss.reshape({1}).to(options) : torch::zeros({1}, options);
  const torch::Tensor others = torch::tensor(own, torch::kFloat64);
  sums_ = torch::cat({others.to(world_.device(), /*non_blocking=*/true), loss});  // forward may still run on a GPU
  work_.emplace(world_.all_reduce_async(sums_));
}

torch::Tensor ExchangeTotals::sums() {
  if (work_) work_->wait();
  work_.reset();
  wait_for_device(world_.device(), world_.timeout());
  return sums_.cpu();
}

std::int64_t ExchangeTotals::samples() { return static_cast<std::int64_t>(sums()[kSamples].item<double>()); }

std::optional<std::int64_t> ExchangeTotals::backwards() {
  const torch::Tensor sums = this->sums();
  const auto* sum = sums.const_data_ptr<double>();
  const auto calls = common_bits(sum + kCalls, world_.size(), sum[kCounting]);
  return calls && *calls > 0 ? std::optional(static_cast<std::int64_t>(*calls / 2)) : std::nullopt;
}

BatchTotals ExchangeTotals::wait() {
  const torch::Tensor sums = this->sums();
  const auto* sum = sums.const_data_ptr<double>();
  const std::int64_t loss = sums.numel() - 1, weights_at = loss - 2 * world_.size();
  const auto* const hash = sum + (kCalls + weights_at) / 2;
  if (!common_bits(sum + kCalls, world_.size(), sum[kCounting]) || !common_bits(hash, world_.size(), world_.size()))
    throw_difference();
  const auto* weights = reinterpret_cast<const RankWeight*>(sum + weights_at);
  const double ranks_alike = compare_weights({weights, to_size(world_.size())}, world_.rank());
  divisor_ = ranks_alike > 0 ? ranks_alike : sum[kSamples];
  if (sum[kStop] > 0) agree_to_stop();
  return {static_cast<std::int64_t>(sum[kSamples]), sum[loss] / sum[kSamples]};
}

// All ranks come here, as all have the same sums. Each compares what all have set with what it has set itself.
void ExchangeTotals::throw_difference() const {
  std::vector<double> own{static_cast<double>(settings_.size())};  // other ranks may have another number of them
  for (const StepSetting& setting : settings_) own.push_back(setting.value);
  const torch::Tensor all = world_.all_gather_rows(torch::tensor(own, torch::kFloat64).to(world_.device())).cpu();
  const auto* theirs = all.const_data_ptr<double>();
  for (int rank = 0; rank < world_.size(); ++rank) {
    const auto count = static_cast<std::size_t>(*theirs++);
    require_same_settings(settings_, world_.rank(), {theirs, count}, rank, "the ranks differ", world_.describe());
    theirs += count;
  }
  throw MismatchError({.what = "other ranks differ from one another in what a step() is",
                       .here = world_.describe(),
                       .likely = "a step(), backward() or setting that depends on the rank",
                       .next = "see the errors of the other ranks"});
}

}  // namespace lockstep
