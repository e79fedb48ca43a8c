// SPDX-License-Identifier: Apache-2.0
#include "lockstep/strategy/ddp/gradient_exchange.h"

#include <utility>

#include "lockstep/deadline.h"

namespace lockstep {
namespace {

class ExchangeInSharedMemory : public GradientExchange {
 public:
  ExchangeInSharedMemory(std::shared_ptr<SharedMemory> memory, std::vector<NamedTensor> parameters,
                         SharedGradientsOptions options)
      : parameters_(parameters) {
    options.on_finished = [this, on_finished = std::move(options.on_finished)](const BatchTotals& totals) {
      count_bytes();
      on_finished(totals);
    };
    gradients_ = std::make_shared<SharedGradients>(std::move(memory), std::move(parameters), std::move(options));
  }
  ~ExchangeInSharedMemory() override { gradients_->close(); }

  double begin(const BatchWeight& batch, const torch::Tensor& loss, bool /*exchanges*/) override {
    return gradients_->begin(batch, loss);
  }
  void end(bool exchanges) override { gradients_->end(exchanges); }
  void cancel(const std::string& reason) override { gradients_->cancel(reason); }

  void finish() override {
    const Stopwatch watch;
    gradients_->finish();
    seconds_ += watch.seconds();
  }

  void drop() override { gradients_->drop(); }
  std::shared_ptr<GradientSource> source() override { return gradients_; }
  bool mean_in_grad() const override { return false; }
  std::int64_t bytes() const override { return bytes_; }
  double seconds() const override { return seconds_; }

 private:
  void count_bytes() {
    for (const auto& [name, parameter] : parameters_)
      if (parameter.grad().defined()) bytes_ += static_cast<std::int64_t>(parameter.nbytes());
  }

  std::vector<NamedTensor> parameters_;
  std::shared_ptr<SharedGradients> gradients_;  // the optimizer holds it, too
  std::int64_t bytes_ = 0;
  double seconds_ = 0;
};

class ExchangeThroughBuckets : public GradientExchange {
 public:
  ExchangeThroughBuckets(std::unique_ptr<Reducer> reducer, std::shared_ptr<LocalGradients> source)
      : reducer_(std::move(reducer)), source_(std::move(source)), slices_(reducer_->slices()) {}
  ~ExchangeThroughBuckets() override {
    if (this->source()) this->source()->close();
  }

  double begin(const BatchWeight& batch, const torch::Tensor& loss, bool exchanges) override {
    if (!exchanges && source_) source_->not_exchanged();
    return exchanges ? reducer_->begin(batch, loss) : reducer_->begin_accumulating(batch, loss);
  }

  void end(bool exchanges) override {
    if (!exchanges) reducer_->end_accumulating();
  }

  void cancel(const std::string& reason) override { reducer_->cancel(reason); }

  void finish() override { reducer_->finish(); }
  void drop() override {  // finish() has dropped the rest
    if (slices_) slices_->drop();
  }
  std::shared_ptr<GradientSource> source() override {
    if (slices_) return slices_;
    return source_;
  }
  bool mean_in_grad() const override { return !slices_; }
  std::int64_t bytes() const override { return reducer_->statistics().bytes; }
  double seconds() const override { return reducer_->statistics().exchange_seconds; }

 private:
  std::unique_ptr<Reducer> reducer_;
  std::shared_ptr<LocalGradients> source_;
  std::shared_ptr<GradientSlices> slices_;
};

}  // namespace

std::unique_ptr<GradientExchange> exchange_in_shared_memory(std::shared_ptr<SharedMemory> memory,
                                                            std::vector<NamedTensor> parameters,
                                                            SharedGradientsOptions options) {
  return std::make_unique<ExchangeInSharedMemory>(std::move(memory), std::move(parameters), std::move(options));
}

std::unique_ptr<GradientExchange> exchange_through_buckets(std::unique_ptr<Reducer> reducer,
                                                           std::shared_ptr<LocalGradients> source) {
  return std::make_unique<ExchangeThroughBuckets>(std::move(reducer), std::move(source));
}

}  // namespace lockstep
