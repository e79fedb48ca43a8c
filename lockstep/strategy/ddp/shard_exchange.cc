// SPDX-License-Identifier: Apache-2.0
#include "lockstep/strategy/ddp/shard_exchange.h"

#include <utility>

#include "lockstep/base/text.h"
#include "lockstep/base/to_size.h"
#include "lockstep/collective/gpus.h"
#include "lockstep/deadline.h"
#include "lockstep/error.h"
#include "lockstep/gradient/bucket.h"
#include "lockstep/gradient/exchange_totals.h"

namespace lockstep {
namespace {

class ExchangeOfShards : public GradientExchange {
 public:
  ExchangeOfShards(World world, std::vector<NamedTensor> parameters, ShardExchangeOptions options)
      : world_(std::move(world)),
        parameters_(std::move(parameters)),
        options_(std::move(options)),
        totals_(world_),
        shards_(to_size(options_.shards / world_.size())) {
    for (Shard& shard : shards_)
      shard.buckets = make_buckets(world_, parameters_, options_.bucket_bytes, options_.shards);
    slices_ = std::make_shared<GradientSlices>(world_, shards_.front().buckets, options_.shards);
  }
  ~ExchangeOfShards() override { slices_->close(); }

  double begin(const BatchWeight& batch, const torch::Tensor& loss, bool /*exchanges*/) override {
    if (failed_) throw after_failed_backward(world_.describe());
    if (done_ == shards_.size())
      throw UsageError(
          {.what = concat("more than ", shards_.size(), " backward() in a step with as many shards on this rank"),
           .here = world_.describe(),
           .next = "call step() after the last shard"});
    failed_ = true;  // unless end() is called
    shards_[done_].batch = {};
    return shards_[done_].batch.add(batch, loss);
  }

  void end(bool /*exchanges*/) override {
    Shard& shard = shards_[done_++];
    for (Bucket& bucket : shard.buckets)
      for (Slot& slot : bucket.slots) slot.pack(shard.batch.samples > 0, shard.batch.weight());
    for (auto& [name, parameter] : parameters_) parameter.mutable_grad().reset();
    failed_ = false;
  }

  void cancel(const std::string& reason) override {
    failed_ = true;
    world_.abandon(reason);
  }

  void finish() override {
    const torch::NoGradGuard no_grad;
    const Stopwatch watch;
    totals_.start(batches_of_rank(), options_.settings());
    BatchTotals totals = totals_.wait();
    totals.mean_loss = sum_of_losses() / static_cast<double>(totals.samples);
    for (std::size_t i = 0; i < shards_.front().buckets.size(); ++i)
      sum_slice(i, totals.samples > 0 ? 1 / totals_.divisor() : 0);
    slices_->exchanged(used_parameters());
    done_ = 0;
    seconds_ += watch.seconds();
    options_.on_finished(totals);
  }

  void drop() override { slices_->drop(); }
  std::shared_ptr<GradientSource> source() override { return slices_; }
  bool mean_in_grad() const override { return false; }
  std::int64_t bytes() const override { return bytes_; }
  double seconds() const override { return seconds_; }

 private:
  struct Shard {
    AccumulatedBatches batch;
    std::vector<Bucket> buckets;
  };

  AccumulatedBatches batches_of_rank() const {
    AccumulatedBatches all;
    all.backwards = std::ssize(shards_);
    for (const Shard& shard : shards_) all.samples += shard.batch.samples;
    return all;
  }

  // One number for each shard of all ranks, added up in their order.
  double sum_of_losses() const {
    const torch::Tensor losses = torch::zeros({options_.shards}, slices_->zero().options());
    for (std::size_t i = 0; i < shards_.size(); ++i)
      if (const torch::Tensor& loss = shards_[i].batch.weighted_loss; loss.defined())
        losses[world_.rank() * std::ssize(shards_) + static_cast<std::int64_t>(i)].copy_(loss);
    world_.all_reduce(losses);
    wait_for_device(world_.device(), world_.timeout());
    const torch::Tensor known = losses.cpu();
    double sum = 0;
    for (int i = 0; i < options_.shards; ++i) sum += known.const_data_ptr<double>()[i];
    return sum;
  }

  // Rank i has shards i V/N ... (i + 1) V/N - 1.
  void sum_slice(std::size_t bucket, double factor) {
    std::vector<torch::Tensor> received;  // [shard of a rank](rank, elements)
    for (const Shard& shard : shards_) {
      const torch::Tensor& values = shard.buckets[bucket].values;
      received.push_back(world_.all_to_all(values.view({world_.size(), -1})));
      bytes_ += static_cast<std::int64_t>(values.nbytes());
    }
    const torch::Tensor& slice = slices_->slice(bucket);
    slice.zero_();
    for (int rank = 0; rank < world_.size(); ++rank)
      for (const torch::Tensor& of_ranks : received) slice.add_(of_ranks[rank]);
    slice.mul_(factor);
  }

  static torch::Tensor flags_of(const Shard& shard) {
    std::vector<torch::Tensor> flags;
    for (const Bucket& bucket : shard.buckets) flags.push_back(bucket.flags.to(torch::kFloat32));
    return torch::cat(flags);
  }

  // Those that have a gradient in a shard of any rank.
  std::vector<torch::Tensor> used_parameters() const {
    const torch::Tensor flags = flags_of(shards_.front());
    for (std::size_t i = 1; i < shards_.size(); ++i) flags.add_(flags_of(shards_[i]));
    world_.all_reduce(flags);
    wait_for_device(world_.device(), world_.timeout());
    const torch::Tensor shards_with_gradient = flags.cpu();
    const auto* count = shards_with_gradient.const_data_ptr<float>();
    std::vector<torch::Tensor> used;
    for (const Bucket& bucket : shards_.front().buckets)
      for (const Slot& slot : bucket.slots)
        if (*count++ > 0) used.push_back(slot.parameter.tensor);
    return used;
  }

  World world_;
  std::vector<NamedTensor> parameters_;
  ShardExchangeOptions options_;
  ExchangeTotals totals_;
  std::vector<Shard> shards_;  // of this rank
  std::shared_ptr<GradientSlices> slices_;
  std::size_t done_ = 0;  // of shards_, in this step
  bool failed_ = false;
  std::int64_t bytes_ = 0;
  double seconds_ = 0;
};

}  // namespace

std::unique_ptr<GradientExchange> exchange_of_shards(World world, std::vector<NamedTensor> parameters,
                                                     ShardExchangeOptions options) {
  return std::make_unique<ExchangeOfShards>(std::move(world), std::move(parameters), std::move(options));
}

}  // namespace lockstep
