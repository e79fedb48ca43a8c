// SPDX-License-Identifier: Apache-2.0
#include "lockstep/gradient/reducer.h"

#include <algorithm>
#include <bit>
#include <limits>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <utility>

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/utils/lambda_post_hook.h>
#include <torch/csrc/autograd/variable.h>

#include "lockstep/base/in_autograd.h"
#include "lockstep/base/text.h"
#include "lockstep/base/trace.h"
#include "lockstep/collective/gpus.h"
#include "lockstep/deadline.h"
#include "lockstep/error.h"
#include "lockstep/gradient/accumulated_batches.h"
#include "lockstep/gradient/bucket.h"
#include "lockstep/gradient/exchange_totals.h"
#include "lockstep/gradient/gradient_watch.h"
#include "lockstep/gradient/unused_parameters.h"

namespace lockstep {
namespace {

torch::Tensor rows_of(const torch::Tensor& gradient) {
  return gradient.layout() == torch::kSparse ? gradient.coalesce() : gradient.to_sparse(1);
}

torch::Tensor no_rows_of(const torch::Tensor& parameter) {
  auto sizes = parameter.sizes().vec();
  sizes[0] = 0;
  return torch::sparse_coo_tensor(torch::empty({1, 0}, parameter.options().dtype(torch::kInt64).requires_grad(false)),
                                  torch::empty(sizes, parameter.options().requires_grad(false)), parameter.sizes())
      ._coalesced_(true);
}

// The sum over ranks of factor * parameter.grad() where gradients have few rows, as an embedding's: each rank sends its
// rows to all others. A coalesced sparse tensor with every row that some rank has; undefined if no rank has any. .grad:
// sparse in the first dimension, or dense; if it is undefined or factor is 0, this rank has no rows.
torch::Tensor sum_of_rows(const World& world, const torch::Tensor& parameter, double factor) {
  const torch::NoGradGuard no_grad;
  const torch::Tensor& gradient = parameter.grad();
  const torch::Tensor mine = gradient.defined() && factor != 0 ? rows_of(gradient) : no_rows_of(parameter);
  const torch::Tensor indices = world.all_gather_rows(mine.indices()[0].contiguous());
  const torch::Tensor values = world.all_gather_rows((mine.values() * factor).contiguous());
  if (indices.numel() == 0) return {};
  return torch::sparse_coo_tensor(indices.unsqueeze(0), values, parameter.sizes()).coalesce();
}

}  // namespace

class Reducer::Impl {
 public:
  // In a world of one there is nothing to exchange: no buckets, no hooks.
  Impl(World world, const std::vector<NamedTensor>& parameters, const ReducerOptions& options, OnFinished on_finished)
      : world_(std::move(world)),
        all_(parameters),
        options_(options),
        on_finished_(std::move(on_finished)),
        totals_(world_) {
    const auto is_sparse = [&](const NamedTensor& parameter) { return options_.sparse.contains(parameter.name); };
    if (world_.size() == 1) return;
    std::copy_if(parameters.begin(), parameters.end(), std::back_inserter(sparse_), is_sparse);
    std::remove_copy_if(parameters.begin(), parameters.end(), std::back_inserter(parameters_), is_sparse);
    build_buckets();
    if (options_.slices) slices_ = std::make_shared<GradientSlices>(world_, buckets_);
  }

  ~Impl() { remove_hooks(); }

  double begin(const BatchWeight& batch, const torch::Tensor& loss) {
    const std::lock_guard lock(mutex_);
    const double factor = count(batch, loss);
    start_exchange();
    if (some_are_unused_ && batch.samples > 0)
      pack_unused(loss.defined() ? reached_by(loss) : reached_by_this_backward());
    return factor;
  }

  BatchTotals finish() {
    const BatchTotals totals = complete_exchange();
    if (on_finished_) on_finished_(totals);
    return totals;
  }

  double begin_accumulating(const BatchWeight& batch, const torch::Tensor& loss) {
    const double factor = count(batch, loss);
    is_accumulating_ = is_active_ = true;
    return factor;
  }

  void end_accumulating() {
    is_accumulating_ = is_active_ = false;
    accumulated_.remember(all_);
  }

  void cancel(const std::string& reason) {
    {
      const std::lock_guard lock(mutex_);
      failed_ = true;
      is_accumulating_ = false;
    }
    world_.abandon(reason);
  }

  const ReducerStatistics& statistics() const { return statistics_; }
  const std::shared_ptr<GradientSlices>& slices() const { return slices_; }

 private:
  // ---- Before backward()

  double count(const BatchWeight& batch, const torch::Tensor& loss) {
    if (failed_ || is_active_) throw after_failed_backward(world_.describe());
    forget_dropped_gradients();
    if (slices_ && batches_.backwards == 0) require_no_gradient();
    return batches_.add(batch, loss);
  }

  void require_no_gradient() const {
    if (const auto old = first_with_gradient(all_))
      throw UsageError(
          {.what = concat("backward() would add to a gradient of ", all_[*old].name, " that it has not counted"),
           .here = world_.describe(),
           .likely = "no zero_grad() since the last exchange, or a gradient that was set by hand",
           .next = "call zero_grad() before backward(); for several backward() per step no_sync() around all "
                   "but the last"});
  }

  // What was counted before a zero_grad() no longer counts.
  void forget_dropped_gradients() {
    if (batches_.samples > 0 && accumulated_.zeroed()) batches_ = {};
  }

  void start_exchange() {
    const torch::NoGradGuard no_grad;
    totals_.start(batches_, options_.settings ? options_.settings() : StepSettings());
    if (scale_ == 0) learn_scale(totals_.wait());  // in the first step: there is no previous one
    // With a hook a rank without samples looks whether any rank has some: it has nothing to compute meanwhile.
    if (batches_.samples > 0 && batches_.leading > 0) ask_the_others();
    skips_hook_ = options_.hook && batches_.samples == 0 && totals_.samples() == 0;
    next_to_send_ = 0;
    first_sent_.reset();
    for_each_slot([](Slot& slot) {
      slot.packed = false;
      slot.times_ready = 0;
    });
    is_active_ = true;
  }

  // This rank's first batches were empty: a zero_grad() of the others may have dropped theirs, which does not show here.
  void ask_the_others() {
    const auto backwards = totals_.backwards();
    if (!backwards) return;
    if (*backwards < batches_.backwards - batches_.leading || *backwards > batches_.backwards)
      throw UsageError({.what = concat("this rank called backward() ", batches_.backwards,
                                       " times since the last exchange, others ", *backwards, " times"),
                        .here = world_.describe(),
                        .likely = "no_sync() on some ranks only",
                        .next = "call backward() equally often on all ranks; with 0 samples where a rank has no "
                                "batch"});
    batches_.backwards = *backwards;
  }

  // Parameters that this backward() will not reach would hold their buckets back until its end.
  void pack_unused(const std::function<bool(const torch::Tensor&)>& reached) {
    for_each_slot([&](Slot& slot) {
      if (!reached(slot.parameter.tensor)) slot.pack(batches_.samples > 0, weight());
    });
    send_full_buckets();
  }

  // A plain loss.backward(), without begin(): every rank counts as one sample, and the end of backward() is the
  // finish(). Autograd holds `guard`; if it is gone before, backward() failed.
  void start_by_itself() {
    if (batches_.samples > 0) throw after_other_backward(world_.describe());
    if (slices_)
      throw UsageError({.what = "a plain loss.backward() where each rank updates a slice of the parameters",
                        .here = world_.describe(),
                        .next = "call backward(loss, samples) of DistributedDataParallel, or leave out slice_update"});
    batches_.add_unknown();
    start_exchange();
    const std::shared_ptr<bool> guard(new bool(false), [this](const bool* finished) {
      if (!*finished) cancel("loss.backward() failed");
      delete finished;
    });
    torch::autograd::Engine::get_default_engine().queue_callback([this, guard] {
      in_autograd([this] { finish(); });
      *guard = true;
    });
  }

  // ---- During backward()

  // On one of autograd's threads, once for each gradient; there is one thread per device, hence the lock.
  void on_ready(Slot& slot) {
    const std::lock_guard lock(mutex_);
    if (failed_) throw after_failed_backward(world_.describe());
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
    for (; next_to_send_ < buckets_.size() && buckets_[next_to_send_].full(); ++next_to_send_)
      send(buckets_[next_to_send_], next_to_send_);
  }

  void send(Bucket& bucket, std::size_t number) {
    const trace::Span span([&] {
      return trace::Label{.name = "send bucket",
                          .number = static_cast<std::int64_t>(number),
                          .bytes = static_cast<std::int64_t>(bucket.flat.nbytes())};
    });
    if (!first_sent_) first_sent_.emplace();
    statistics_.bytes += static_cast<std::int64_t>(bucket.flat.nbytes());
    if (options_.hook) {
      const torch::NoGradGuard no_grad;
      bucket.work.emplace(world_.all_reduce_async(bucket.flags));
      bucket.finish_hook = nullptr;
      if (!skips_hook_)
        bucket.finish_hook = options_.hook->start(world_, {number, bucket.values, bucket.parts(), scale_});
    } else if (slices_) {
      bucket.work.emplace(world_.all_reduce_async(bucket.flags));
      bucket.slice_work.emplace(world_.reduce_scatter_async(bucket.values, {.output = slices_->slice(number)}));
    } else {
      bucket.work.emplace(world_.all_reduce_async(bucket.flat, {.algorithm = options_.algorithm}));
    }
  }

  // ---- After backward()

  BatchTotals complete_exchange() {
    const std::lock_guard lock(mutex_);
    pack_the_rest();
    const BatchTotals totals = totals_.wait();
    if (slices_)
      store_slices(totals.samples > 0 ? scale_ / totals_.divisor() : 0);
    else
      for (Bucket& bucket : buckets_) store_means(bucket, scale_ / totals_.divisor());
    for (const auto& [name, parameter] : sparse_) exchange_rows(parameter, totals);
    if (world_.size() == 1 && batches_.samples > 0)
      scale_own(batches_.weight(batches_.backwards - batches_.leading) / batches_.samples);
    if (first_sent_) statistics_.exchange_seconds += first_sent_->seconds();
    learn_scale(totals);
    if (!order_is_known_ && !buckets_.empty()) follow_order_of_rank_0();
    is_active_ = false;
    batches_ = {};
    return totals;
  }

  void pack_the_rest() {
    for_each_slot([this](Slot& slot) {
      if (!slot.packed) slot.pack(batches_.samples > 0, weight());
      if (batches_.samples == 0) return;
      if (slot.times_ready == 0) some_are_unused_ = true;
      if (options_.static_graph)
        times_ready_.try_emplace(slot.parameter.tensor.unsafeGetTensorImpl(), slot.times_ready);
    });
    send_full_buckets();
  }

  // s of the next step.
  void learn_scale(const BatchTotals& totals) {
    if (totals.samples > 0) scale_ = static_cast<double>(std::bit_floor(static_cast<std::uint64_t>(totals.samples)));
  }

  double weight() const {  // m_j / s
    return batches_.weight() / scale_;
  }

  void store_means(Bucket& bucket, double factor) {
    const torch::NoGradGuard no_grad;
    const trace::Span span("receive bucket", &bucket - buckets_.data());
    bucket.work->wait();
    if (bucket.finish_hook) bucket.finish_hook();
    const torch::Tensor ranks_with_gradient = bucket.flags.to(torch::kCPU, torch::kFloat32);
    const auto* count = ranks_with_gradient.const_data_ptr<float>();
    for (Slot& slot : bucket.slots)
      if (*count++ > 0)
        slot.store_mean(factor, options_.gradient_as_bucket_view);
  }

  // NCCL makes its calls in order: whoever waits for the slice has waited for the flags.
  void store_slices(double factor) {
    const torch::NoGradGuard no_grad;
    std::vector<torch::Tensor> used;
    for (std::size_t i = 0; i < buckets_.size(); ++i) {
      Bucket& bucket = buckets_[i];
      const trace::Span span("receive bucket", static_cast<std::int64_t>(i));
      bucket.slice_work->wait();
      torch::Tensor(slices_->slice(i)).mul_(factor);
      wait_for_device(world_.device(), world_.timeout());
      const torch::Tensor ranks_with_gradient = bucket.flags.to(torch::kCPU, torch::kFloat32);
      const auto* count = ranks_with_gradient.const_data_ptr<float>();
      for (const Slot& slot : bucket.slots)
        if (*count++ > 0) used.push_back(slot.parameter.tensor);
    }
    slices_->exchanged(std::move(used));
  }

  // Alone there are no buckets: .grad is the sum of the batches. It is the mean already unless their sizes differ.
  void scale_own(double factor) const {
    const torch::NoGradGuard no_grad;
    for (const auto& [name, parameter] : all_)
      if (factor != 1 && parameter.grad().defined()) parameter.grad().mul_(factor);
  }

  // Only now: how many rows there are is not known before.
  void exchange_rows(const torch::Tensor& parameter, const BatchTotals& totals) {
    if (totals.samples == 0) return;
    const double factor = batches_.samples > 0 ? batches_.weight() / totals_.divisor() : 0;
    const torch::Tensor mean = sum_of_rows(world_, parameter, factor);
    if (mean.defined()) statistics_.bytes += static_cast<std::int64_t>(mean._values().nbytes());
    parameter.mutable_grad() = mean;
  }

  // ---- Buckets

  void for_each_slot(const auto& each) {
    for (Bucket& bucket : buckets_)
      for (Slot& slot : bucket.slots) each(slot);
  }

  // parameters_ is in the reverse of the order in which the buckets should fill.
  void build_buckets() {
    remove_hooks();
    buckets_.clear();  // gives its memory back first
    buckets_ = make_buckets(world_, parameters_, options_.bucket_bytes, options_.slices ? world_.size() : 0);
    auto index = static_cast<std::int64_t>(parameters_.size());
    for_each_slot([&](Slot& slot) {
      slot.index = --index;
      add_hook(slot);
    });
  }

  // Calls on_ready(slot) once autograd has accumulated the gradient; several times in a backward() that contains another
  // one. What it throws comes out of backward().
  void add_hook(Slot& slot) {
    if (!slot.parameter.tensor.requires_grad()) return;  // frozen meanwhile: packed after backward()
    auto accumulator = torch::autograd::impl::grad_accumulator(slot.parameter.tensor);
    const std::uintptr_t key = accumulator->add_post_hook(std::make_unique<torch::autograd::utils::LambdaPostHook>(
        [this, &slot](const auto& outputs, const auto& /*inputs*/) {
          in_autograd([&] { on_ready(slot); });
          return outputs;
        }));
    hooks_.emplace_back(std::move(accumulator), key);
  }

  void remove_hooks() {
    for (const auto& [accumulator, key] : hooks_) accumulator->del_post_hook(key);
    hooks_.clear();
  }

  // Once, after the first exchange: buckets are built anew, in the order in which gradients became ready on rank 0;
  // parameters that did not become ready come last. Not with a hook, which keeps memory for each bucket, nor with slices, whose
  // optimizer state lies as the buckets do.
  void follow_order_of_rank_0() {
    order_is_known_ = true;
    if (options_.hook || slices_) return;
    for (std::int64_t i = 0; i < static_cast<std::int64_t>(parameters_.size()); ++i)
      if (std::find(ready_order_.begin(), ready_order_.end(), i) == ready_order_.end()) ready_order_.push_back(i);
    wait_for_device(world_.device(), world_.timeout());
    const torch::Tensor order = torch::tensor(ready_order_, torch::kInt64).to(world_.device());
    world_.broadcast(order);
    const torch::Tensor in_order = order.flip(0).cpu();
    const auto* index = in_order.const_data_ptr<std::int64_t>();
    std::vector<NamedTensor> sorted;
    for (std::int64_t i = 0; i < in_order.numel(); ++i) sorted.push_back(parameters_[index[i]]);
    parameters_ = std::move(sorted);
    build_buckets();
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
  std::vector<NamedTensor> all_;
  std::vector<NamedTensor> parameters_;  // whose gradients go through buckets
  std::vector<NamedTensor> sparse_;      // whose gradients are exchanged row by row
  ReducerOptions options_;
  OnFinished on_finished_;
  std::vector<Bucket> buckets_;
  std::shared_ptr<GradientSlices> slices_;            // the optimizer has it, too
  bool order_is_known_ = false;                       // buckets fill in the order in which gradients become ready
  std::vector<std::int64_t> ready_order_;             // in the first exchange: indices of parameters
  std::unordered_map<const void*, int> times_ready_;  // with a static graph: of each parameter, once it is known
  bool some_are_unused_ = false;  // some step left a parameter out: later ones look for such before backward()
  ReducerStatistics statistics_;
  std::vector<std::pair<std::shared_ptr<torch::autograd::Node>, std::uintptr_t>> hooks_;  // accumulator, key
  bool is_accumulating_ = false;  // after begin_accumulating(); changes only while no backward() runs

  std::mutex mutex_;            // guards what follows, and the buckets
  bool is_active_ = false;      // between begin and finish
  bool failed_ = false;         // cancel() was called
  AccumulatedBatches batches_;  // since the last exchange
  GradientWatch accumulated_;   // what was in .grad in end_accumulating()
  ExchangeTotals totals_;
  bool skips_hook_ = false;              // in this exchange: no rank has samples, and residuals stay as they are
  std::optional<Stopwatch> first_sent_;  // since the first bucket of this exchange was sent
  double scale_ = 0;                     // s; 0 before the first step with samples
  std::size_t next_to_send_ = 0;
};

Reducer::Reducer(World world, const std::vector<NamedTensor>& parameters, const ReducerOptions& options,
                 OnFinished on_finished)
    : impl_(std::make_unique<Impl>(std::move(world), parameters, options, std::move(on_finished))) {}
Reducer::~Reducer() = default;
double Reducer::begin(const BatchWeight& batch, const torch::Tensor& loss) { return impl_->begin(batch, loss); }
BatchTotals Reducer::finish() { return impl_->finish(); }
double Reducer::begin_accumulating(const BatchWeight& batch, const torch::Tensor& loss) {
  return impl_->begin_accumulating(batch, loss);
}
void Reducer::end_accumulating() { impl_->end_accumulating(); }
void Reducer::cancel(const std::string& reason) { impl_->cancel(reason); }
const ReducerStatistics& Reducer::statistics() const { return impl_->statistics(); }
std::shared_ptr<GradientSlices> Reducer::slices() const { return impl_->slices(); }

}  // namespace lockstep
