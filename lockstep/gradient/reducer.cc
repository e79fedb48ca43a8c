// SPDX-License-Identifier: Apache-2.0
#include "lockstep/gradient/reducer.h"

#include <algorithm>
#include <bit>
#include <limits>
#include <mutex>
#include <optional>
#include <unordered_map>

#include <torch/csrc/autograd/engine.h>

#include "lockstep/base/text.h"
#include "lockstep/deadline.h"
#include "lockstep/error.h"
#include "lockstep/gradient/accumulated_batches.h"
#include "lockstep/gradient/bucket.h"
#include "lockstep/gradient/exchange_totals.h"
#include "lockstep/gradient/ready_hooks.h"
#include "lockstep/gradient/sparse_exchange.h"
#include "lockstep/gradient/unused_parameters.h"

namespace lockstep {
namespace {

// A bucket, and its exchange while that is under way.
struct BucketExchange {
  Bucket bucket;
  std::optional<Work> work{};          // of the whole bucket; with a hook, of the flags alone
  CommunicationHook::Finish finish{};  // with a hook
};

}  // namespace

class Reducer::Impl {
 public:
  // In a world of one there is nothing to exchange: no buckets, no hooks.
  Impl(World world, const std::vector<NamedTensor>& parameters, const ReducerOptions& options, OnFinished on_finished)
      : world_(std::move(world)), options_(options), on_finished_(std::move(on_finished)), totals_(world_) {
    const auto is_sparse = [&](const NamedTensor& parameter) { return options_.sparse.contains(parameter.name); };
    if (world_.size() == 1) return;
    std::copy_if(parameters.begin(), parameters.end(), std::back_inserter(sparse_), is_sparse);
    std::remove_copy_if(parameters.begin(), parameters.end(), std::back_inserter(parameters_), is_sparse);
    build_buckets();
  }

  torch::Tensor begin(std::int64_t samples, const torch::Tensor& loss) {
    const std::lock_guard lock(mutex_);
    if (is_active_) throw unfinished();
    const torch::Tensor start = batches_.add(samples, loss);
    start_exchange();
    if (some_are_unused_) pack_unused(loss);
    return start;
  }

  BatchTotals finish() {
    const BatchTotals totals = complete_exchange();
    if (on_finished_) on_finished_(totals);
    return totals;
  }

  void accumulate(std::int64_t samples, const torch::Tensor& loss) {
    const torch::Tensor start = begin_to_accumulate(samples, loss);
    try {
      if (samples > 0) loss.backward(start);
    } catch (...) {
      stop_accumulating();
      throw;
    }
    stop_accumulating();
  }

  const ReducerStatistics& statistics() const { return statistics_; }

 private:
  // ---- Before backward()

  void start_exchange() {
    const torch::NoGradGuard no_grad;
    totals_.start(batches_, options_.settings ? options_.settings() : StepSettings());
    if (scale_ == 0) learn_scale(totals_.wait());  // in the first step: there is no previous one
    next_to_send_ = 0;
    first_sent_.reset();
    for (BucketExchange& exchange : exchanges_)
      for (Slot& slot : exchange.bucket.slots) {
        slot.packed = false;
        slot.times_ready = 0;
      }
    is_active_ = true;
  }

  // Parameters that this backward() will not reach would hold their buckets back until its end.
  void pack_unused(const torch::Tensor& loss) {
    const auto reached = reached_by(loss);
    for (BucketExchange& exchange : exchanges_)
      for (Slot& slot : exchange.bucket.slots)
        if (!reached(slot.parameter.tensor)) slot.pack(batches_.samples > 0, weight());
    send_full_buckets();
  }

  torch::Tensor begin_to_accumulate(std::int64_t samples, const torch::Tensor& loss) {
    const std::lock_guard lock(mutex_);
    if (is_active_) throw unfinished();
    is_accumulating_ = true;
    return batches_.add(samples, loss);
  }

  void stop_accumulating() {
    const std::lock_guard lock(mutex_);
    is_accumulating_ = false;
  }

  // A plain loss.backward(), without begin(): every rank counts as one sample, and the end of backward() is the
  // finish().
  void start_by_itself() {
    batches_.add_unknown();
    start_exchange();
    torch::autograd::Engine::get_default_engine().queue_callback([this] { finish(); });
  }

  // ---- During backward()

  // On one of autograd's threads, once for each gradient; there is one thread per device, hence the lock.
  void on_ready(Slot& slot) {
    const std::lock_guard lock(mutex_);
    if (is_accumulating_) return;
    if (!is_active_) start_by_itself();
    if (slot.packed) throw ready_again(slot.parameter.name);
    if (++slot.times_ready == 1 && !order_is_known_) ready_order_.push_back(slot.index);
    if (slot.times_ready < times_expected(slot)) return;
    slot.pack(batches_.samples > 0, weight());
    send_full_buckets();
  }

  // How often a gradient becomes ready in one backward(). With a static graph the first exchange counts, and waits for
  // the end of backward(); later ones know.
  int times_expected(const Slot& slot) const {
    if (!options_.static_graph) return 1;
    const auto found = times_ready_.find(slot.parameter.tensor.unsafeGetTensorImpl());
    return found == times_ready_.end() ? std::numeric_limits<int>::max() : found->second;
  }

  // Buckets are sent in their order, whichever is full first: gradients may become ready in another order on each rank,
  // but collectives must be started in the same order on all of them.
  void send_full_buckets() {
    for (; next_to_send_ < exchanges_.size() && exchanges_[next_to_send_].bucket.full(); ++next_to_send_)
      send(next_to_send_);
  }

  void send(std::size_t number) {
    auto& [bucket, work, finish] = exchanges_[number];
    if (!first_sent_) first_sent_.emplace();
    statistics_.bytes += static_cast<std::int64_t>(bucket.flat.nbytes());
    if (options_.hook) {
      const torch::NoGradGuard no_grad;
      work.emplace(world_.all_reduce_async(bucket.flags));
      finish = options_.hook->start(world_, {number, bucket.values, bucket.parts(), scale_});
    } else {
      work.emplace(world_.all_reduce_async(bucket.flat, {.algorithm = options_.algorithm}));
    }
  }

  // ---- After backward()

  BatchTotals complete_exchange() {
    const std::lock_guard lock(mutex_);
    pack_the_rest();
    const BatchTotals totals = totals_.wait();
    for (BucketExchange& exchange : exchanges_) store_means(exchange, scale_ / static_cast<double>(totals.samples));
    for (const auto& [name, parameter] : sparse_) exchange_rows(parameter, totals);
    if (first_sent_) statistics_.exchange_seconds += first_sent_->seconds();
    learn_scale(totals);
    if (!order_is_known_ && !exchanges_.empty()) follow_order_of_rank_0();
    is_active_ = false;
    batches_ = {};
    return totals;
  }

  void pack_the_rest() {
    for (BucketExchange& exchange : exchanges_)
      for (Slot& slot : exchange.bucket.slots) {
        if (!slot.packed) slot.pack(batches_.samples > 0, weight());
        if (batches_.samples == 0) continue;
        if (slot.times_ready == 0) some_are_unused_ = true;
        if (options_.static_graph)
          times_ready_.try_emplace(slot.parameter.tensor.unsafeGetTensorImpl(), slot.times_ready);
      }
    send_full_buckets();
  }

  // s of the next step.
  void learn_scale(const BatchTotals& totals) {
    if (totals.samples > 0) scale_ = static_cast<double>(std::bit_floor(static_cast<std::uint64_t>(totals.samples)));
  }

  double weight() const { return batches_.weight() / scale_; }  // m_j / s

  void store_means(BucketExchange& exchange, double factor) {
    const torch::NoGradGuard no_grad;
    exchange.work->wait();
    if (exchange.finish) exchange.finish();
    const torch::Tensor ranks_with_gradient = exchange.bucket.flags.to(torch::kCPU, torch::kFloat32);
    const auto* count = ranks_with_gradient.const_data_ptr<float>();
    for (Slot& slot : exchange.bucket.slots)
      if (*count++ > 0) slot.store_mean(factor, options_.gradient_as_bucket_view);
  }

  // Only now: how many rows there are is not known before.
  void exchange_rows(const torch::Tensor& parameter, const BatchTotals& totals) {
    if (totals.samples == 0) return;
    const double factor = batches_.samples > 0 ? batches_.weight() / static_cast<double>(totals.samples) : 0;
    const torch::Tensor mean = sum_of_rows(world_, parameter, factor);
    if (mean.defined()) statistics_.bytes += static_cast<std::int64_t>(mean._values().nbytes());
    parameter.mutable_grad() = mean;
  }

  // ---- Buckets

  // parameters_ is in the reverse of the order in which the buckets should fill.
  void build_buckets() {
    for (Bucket& bucket : make_buckets(world_, parameters_, options_.bucket_bytes))
      exchanges_.push_back({std::move(bucket)});
    std::int64_t index = static_cast<std::int64_t>(parameters_.size());
    for (BucketExchange& exchange : exchanges_)
      for (Slot& slot : exchange.bucket.slots) {
        slot.index = --index;
        hooks_.add(slot.parameter.tensor, [this, &slot] { on_ready(slot); });
      }
  }

  // Once, after the first exchange: buckets are built anew, in the order in which gradients became ready on rank 0;
  // parameters that did not become ready come last. Not with a hook, which keeps memory for each bucket.
  void follow_order_of_rank_0() {
    order_is_known_ = true;
    if (options_.hook) return;
    for (std::int64_t i = 0; i < static_cast<std::int64_t>(parameters_.size()); ++i)
      if (std::find(ready_order_.begin(), ready_order_.end(), i) == ready_order_.end()) ready_order_.push_back(i);
    const torch::Tensor order = torch::tensor(ready_order_, torch::kInt64).to(world_.device());
    world_.broadcast(order);
    const torch::Tensor in_order = order.flip(0).cpu();
    const auto* index = in_order.const_data_ptr<std::int64_t>();
    std::vector<NamedTensor> sorted;
    for (std::int64_t i = 0; i < in_order.numel(); ++i) sorted.push_back(parameters_[index[i]]);
    parameters_ = std::move(sorted);
    hooks_.clear();
    exchanges_.clear();
    build_buckets();
  }

  // ---- Errors

  UsageError unfinished() const {
    return UsageError({.what = "backward() was called after one that failed half-way",
                       .here = world_.describe(),
                       .likely = "an exception in backward() that was caught and ignored",
                       .next = "let it end the program, and go on from a checkpoint"});
  }

  UsageError ready_again(const std::string& name) const {
    return UsageError(
        {.what = concat("the gradient of ", name, " became ready again after it was sent"),
         .here = world_.describe(),
         .likely = options_.static_graph ? "a graph that is not the one of the first step"
                                         : "a backward() inside of backward(), such as activation checkpointing",
         .next = options_.static_graph ? "leave static_graph off"
                                       : "static_graph = true, if every step is like the first; or one backward() "
                                         "per step, on the sum of the losses"});
  }

  World world_;
  std::vector<NamedTensor> parameters_;  // whose gradients go through buckets
  std::vector<NamedTensor> sparse_;      // whose gradients are exchanged row by row
  ReducerOptions options_;
  OnFinished on_finished_;
  std::vector<BucketExchange> exchanges_;             // of each bucket
  bool order_is_known_ = false;                       // buckets fill in the order in which gradients become ready
  std::vector<std::int64_t> ready_order_;             // in the first exchange: indices of parameters
  std::unordered_map<const void*, int> times_ready_;  // with a static graph: of each parameter, once it is known
  bool some_are_unused_ = false;  // some step left a parameter out: later ones look for such before backward()
  ReducerStatistics statistics_;
  ReadyHooks hooks_;

  std::mutex mutex_;              // guards what follows, and the buckets
  bool is_active_ = false;        // between begin and finish
  bool is_accumulating_ = false;  // inside accumulate()
  AccumulatedBatches batches_;    // since the last exchange
  ExchangeTotals totals_;
  std::optional<Stopwatch> first_sent_;  // since the first bucket of this exchange was sent
  double scale_ = 0;                     // s; 0 before the first step with samples
  std::size_t next_to_send_ = 0;
};

Reducer::Reducer(World world, const std::vector<NamedTensor>& parameters, const ReducerOptions& options,
                 OnFinished on_finished)
    : impl_(std::make_unique<Impl>(std::move(world), parameters, options, std::move(on_finished))) {}
Reducer::~Reducer() = default;
torch::Tensor Reducer::begin(std::int64_t samples, const torch::Tensor& loss) { return impl_->begin(samples, loss); }
BatchTotals Reducer::finish() { return impl_->finish(); }
void Reducer::accumulate(std::int64_t samples, const torch::Tensor& loss) { impl_->accumulate(samples, loss); }
const ReducerStatistics& Reducer::statistics() const { return impl_->statistics(); }

}  // namespace lockstep
