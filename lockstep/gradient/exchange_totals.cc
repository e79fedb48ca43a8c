// SPDX-License-Identifier: Apache-2.0
#include "lockstep/gradient/exchange_totals.h"

#include <algorithm>
#include <limits>

#include "lockstep/base/stop.h"
#include "lockstep/collective/world_state.h"
#include "lockstep/error.h"

namespace lockstep {
namespace {

// Where each number is. After these the bits of the calls, those of the hash, and the loss.
// Calls: twice the number of backward(), and 1 more for loss.backward(), of a rank that counts.
enum Sum : std::uint8_t { kSamples, kCounting, kStop, kBitsOfCalls };

// Not of ranks whose first batches were empty: what they counted the others may have dropped since.
const char* const kBackwards = "the number of backward() since the last exchange";
const char* const kPlain = "loss.backward() instead of ddp.backward()";

std::span<const double> numbers_in(const torch::Tensor& tensor) {
  return {tensor.const_data_ptr<double>(), to_size(tensor.numel())};
}

}  // namespace

void BitCounts::append(std::uint64_t bits, std::vector<double>& numbers) const {
  for (int first = 0; first < 64; first += per_number_) {
    std::uint64_t counts = 0;
    for (int bit = first; bit < std::min(first + per_number_, 64); ++bit)
      counts |= (bits >> bit & 1) << (bit - first) * width_;
    numbers.push_back(static_cast<double>(counts));
  }
}

std::optional<std::uint64_t> BitCounts::common(std::span<const double> sums, double ranks) const {
  std::uint64_t bits = 0;
  auto sum = sums.begin();
  for (int first = 0; first < 64; first += per_number_) {
    auto counts = static_cast<std::uint64_t>(*sum++);
    for (int bit = first; counts != 0; ++bit, counts >>= width_) {
      const std::uint64_t count = counts & ((std::uint64_t{1} << width_) - 1);
      if (count != 0 && static_cast<double>(count) != ranks) return std::nullopt;
      bits |= std::uint64_t{count != 0} << bit;
    }
  }
  return bits;
}

void ExchangeTotals::start(const AccumulatedBatches& batches, StepSettings settings) {
  settings_ = std::move(settings);
  const double counting = batches.samples > 0 && batches.leading == 0 ? 1 : 0;
  const auto backwards = static_cast<double>(batches.backwards);
  const double plain = batches.is_plain ? 1 : 0, none = counting > 0 ? 0 : std::numeric_limits<double>::quiet_NaN();
  std::vector<double> own{batches.samples, counting, wants_to_stop() ? 1.0 : 0.0};
  bits_.append(static_cast<std::uint64_t>(counting * (2 * backwards + plain)), own);
  bits_.append(hash_of(settings_), own);
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
  WorldState::wait_for_device(world_);
  return sums_.cpu();
}

std::int64_t ExchangeTotals::samples() { return static_cast<std::int64_t>(sums()[kSamples].item<double>()); }

std::optional<std::int64_t> ExchangeTotals::backwards() {
  const torch::Tensor sums = this->sums();
  const auto calls = common_calls(numbers_in(sums));
  return calls && *calls > 0 ? std::optional(static_cast<std::int64_t>(*calls / 2)) : std::nullopt;
}

std::optional<std::uint64_t> ExchangeTotals::common_calls(std::span<const double> sums) const {
  return bits_.common(sums.subspan(kBitsOfCalls), sums[kCounting]);
}

BatchTotals ExchangeTotals::wait() {
  const torch::Tensor sums = this->sums();
  const auto sum = numbers_in(sums);
  if (!common_calls(sum) || !bits_.common(sum.subspan(kBitsOfCalls + bits_.size()), world_.size())) throw_difference();
  if (sum[kStop] > 0) agree_to_stop();
  return {static_cast<std::int64_t>(sum[kSamples]), sum.back() / sum[kSamples]};
}

// All ranks come here, as all have the same sums. Each compares what all have set with what it has set itself.
void ExchangeTotals::throw_difference() const {
  std::vector<double> own{static_cast<double>(settings_.size())};  // other ranks may have another number of them
  for (const StepSetting& setting : settings_) own.push_back(setting.value);
  const torch::Tensor all = world_.all_gather_rows(torch::tensor(own, torch::kFloat64).to(world_.device())).cpu();
  auto theirs = numbers_in(all);
  for (int rank = 0; rank < world_.size(); ++rank) {
    const auto count = static_cast<std::size_t>(theirs[0]);
    require_same_settings(settings_, world_.rank(), theirs.subspan(1, count), rank, "the ranks differ",
                          world_.describe());
    theirs = theirs.subspan(1 + count);
  }
  throw MismatchError({.what = "other ranks differ from one another in what a step() is",
                       .here = world_.describe(),
                       .likely = "a step(), backward() or setting that depends on the rank",
                       .next = "see the errors of the other ranks"});
}

}  // namespace lockstep
