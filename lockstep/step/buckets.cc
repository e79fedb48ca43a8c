// SPDX-License-Identifier: Apache-2.0
// step/buckets.cc: packs gradients into flat buckets and starts an all-reduce of each full one.
//
// Note [A step through buckets]
//   begin()   starts to all-reduce (m_j, m_j loss_j) and what shows that all ranks agree (step/exchange_totals.h)
//   hooks     a gradient is ready: times m_j / s into its bucket. A bucket is full, and all before it are sent: its
//             all-reduce is started. Between machines and on GPUs it runs beside backward(); on the CPUs of one machine
//             it is deferred to finish() (collective/calls/call_queue.h)
//   finish()  sends the buckets that never filled; waits for all; puts s / n times the sums into .grad
// s: the largest power of two that is at most n of the previous step (docs/design/exchange.md says why).
//
// Note [Unused parameters]
// A parameter that took no part on some ranks counts as zero there. Besides its gradients a bucket carries one flag per
// parameter, so that one that took no part on any rank keeps an undefined .grad, as it does on a single rank. Such
// parameters would hold their buckets back until the end of backward(); so once a step has left some out, the first hook of a
// backward() packs at once those that it will not reach.
//
// Note [Slices]
// With slices a bucket is reduce-scattered: each rank gets the mean of its slice, and .grad stays its own. So backward()
// can't add to what was exchanged, as it can to a mean, and a plain loss.backward(), which does not say when it begins, is
// refused.
//
// Note [Virtual shards]
// NCCL's sums depend on the number of ranks. So the gradients of each of V shards are packed into buckets of their own
// after its backward(), times its samples. finish() sends them all-to-all: each rank gets its slice of all V and adds them
// up in their order. A step sends V/N * (N-1)/N * K from each rank, beside the parameters.
#include <algorithm>
#include <bit>
#include <limits>
#include <mutex>
#include <numeric>
#include <optional>
#include <unordered_map>
#include <utility>

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/utils/lambda_post_hook.h>
#include <torch/csrc/autograd/variable.h>

#include "lockstep/base/process/in_autograd.h"
#include "lockstep/base/text.h"
#include "lockstep/base/to_size.h"
#include "lockstep/base/torch_version.h"
#include "lockstep/collective/gpus.h"
#include "lockstep/deadline.h"
#include "lockstep/error.h"
#include "lockstep/observe/trace.h"
#include "lockstep/step/accumulated_batches.h"
#include "lockstep/step/bucket.h"
#include "lockstep/step/exchange.h"
#include "lockstep/step/exchange_totals.h"
#include "lockstep/step/gradient_slices.h"
#include "lockstep/step/guards/gradient_watch.h"
#include "lockstep/step/local_gradients.h"

namespace lockstep {
namespace {

// The sum over ranks of factor * parameter.grad() where gradients have few rows, as an embedding's: each rank sends its
// rows to all others. A coalesced sparse tensor with every row that some rank has; undefined if no rank has any. .grad:
// sparse in the first dimension, or dense; if it is undefined or factor is 0, this rank has no rows.
torch::Tensor sum_of_rows(const World& world, const torch::Tensor& parameter, double factor) {
  const torch::NoGradGuard no_grad;
  torch::Tensor rows = torch::empty({0}, parameter.options().dtype(torch::kInt64).requires_grad(false));
  torch::Tensor values = parameter.narrow(0, 0, 0);
  if (const torch::Tensor& gradient = parameter.grad(); gradient.defined() && factor != 0) {
    const torch::Tensor mine = gradient.layout() == torch::kSparse ? gradient.coalesce() : gradient.to_sparse(1);
    rows = mine.indices()[0];
    values = mine.values() * factor;
  }
  rows = world.all_gather_rows(rows.contiguous());
  values = world.all_gather_rows(values.contiguous());
  if (rows.numel() == 0) return {};
  return torch::sparse_coo_tensor(rows.unsqueeze(0), values, parameter.sizes()).coalesce();
}

class Buckets : public Exchange {
 public:
  // Puts parameters into buckets in reverse order, the order in which backward() tends to reach them; after the first
  // exchange in the order in which those of rank 0 became ready. In a world of one there is nothing to exchange: no
  // buckets, no hooks; with shards its sums have the order of several ranks.
  Buckets(World world, const NamedTensors& parameters, const DistributedDataParallelOptions& options,
          const BucketPlan& plan)
      : Exchange(plan.memory ? plan.memory : SharedMemory::alone()),
        world_(std::move(world)),
        all_(parameters),
        options_(options),
        plan_(plan),
        shards_(to_size(std::max(options.virtual_shards / world_.size(), 1))),
        buckets_(shards_.front()),
        totals_(world_),
        scale_(options.virtual_shards > 0 ? 1 : 0),
        agreement_(memory_, plan.block),
        is_exchanged_(world_.size() == 1 && !plan.slices) {
    std::ranges::copy_if(all_, std::back_inserter(trained_), [](const auto& p) { return p.tensor.requires_grad(); });
    if (is_alone()) return;
    for (const NamedTensor& parameter : trained_)
      (options_.sparse_parameters.contains(parameter.name) ? sparse_ : parameters_).push_back(parameter);
    build_buckets();
    if (plan_.slices) slices_ = std::make_shared<GradientSlices>(world_, buckets_, options_.virtual_shards);
  }

  ~Buckets() override { remove_hooks(); }

  // ---- Around backward()

  // Without samples or without a loss also inside of the backward(), before the first gradient of a parameter. Blocks only
  // in the first step, to learn s.
  double begin(const BatchWeight& batch, const torch::Tensor& loss, bool exchanges) override {
    const std::lock_guard lock(mutex_);
    if (failed_ || is_active_) throw after_failed_backward(world_.describe());
    if (options_.virtual_shards > 0) return begin_shard(batch, loss);
    if (batches_.samples > 0 && accumulated_.zeroed()) batches_ = {};  // counted before a zero_grad()
    if (slices_ && batches_.backwards == 0) require_no_gradient(trained_);
    const double factor = batches_.add(batch, loss);
    is_accumulating_ = !exchanges;
    if (!exchanges) {
      is_active_ = true;
      is_exchanged_ = false;
      return factor;
    }
    start_exchange();
    return factor;
  }

  void end(bool exchanges) override {
    if (options_.virtual_shards > 0) return end_shard();
    if (exchanges) return;
    is_accumulating_ = is_active_ = false;
    accumulated_.remember();
  }

  // A plain loss.backward() that fails does the same.
  void cancel(const std::string& reason) override {
    {
      const std::lock_guard lock(mutex_);
      failed_ = true;
      is_accumulating_ = false;
    }
    world_.abandon(reason);
  }

  // Sends 2(N-1)/N * K in all.
  BatchTotals finish() override {
    const BatchTotals totals = complete_exchange();
    if (plan_.on_finished) plan_.on_finished(totals);
    if (slices_ || plan_.memory) watch_.remember();
    is_exchanged_ = true;
    has_stepped_ = false;
    return totals;
  }

  void drop() override {
    if (slices_) is_exchanged_ = false;
  }

  void make_mean() override {
    if (slices_)
      throw UsageError({.what = "mean_gradients() of GPUs that update a slice each",
                        .here = world_.describe(),
                        .next = "make DistributedDataParallel without slice_update, or with mean_in_grad = true"});
  }

  void close() override {
    Exchange::close();
    remove_hooks();
    for (auto& buckets : shards_) buckets.clear();
    options_.hook.reset();  // it may keep as much as the model has
    plan_.settings = nullptr;
    plan_.on_finished = nullptr;
  }

  // ---- In step(), with slices or where the ranks of a machine share parameters

  std::shared_ptr<GradientSlices> slices() const override { return slices_; }

  // .grad is the same mean on every rank. One that is written by hand until the step, to clip it for instance, must be so
  // on all ranks; with slices on none.
  WeightedGradients begin_update(const Tensors& parameters, const StepSettings& settings) override {
    require_open();
    if (slices_) {
      require_slices_exchanged();
      return {};
    }
    agreement_.require_parameters_untouched();
    const bool is_changed = watch_.changed().has_value();
    if (!is_exchanged_ || (has_stepped_ && is_changed)) require_nothing_to_step(parameters);
    mean_was_changed_ = is_changed && !has_stepped_;
    agreement_.begin_update(with_mean_changed(settings, mean_was_changed_));  // barrier 2
    return in_grad_.begin_update(parameters, settings);
  }

  void end_update() override {
    if (slices_) {
      slices_->all_gather();
      is_exchanged_ = false;
      return;
    }
    in_grad_.release();
    agreement_.end_update();  // barrier 3
    has_stepped_ = world_.size() > 1;
    has_stepped_ ? watch_.remember() : watch_.forget();
  }

 private:
  bool is_alone() const { return world_.size() == 1 && options_.virtual_shards == 0; }

  // ---- Before backward()

  void start_exchange() {
    const torch::NoGradGuard no_grad;
    StepSettings settings = plan_.settings ? plan_.settings() : StepSettings();
    if (plan_.memory) settings = with_mean_changed(std::move(settings), mean_was_changed_);
    totals_.start(batches_, std::move(settings));
    if (scale_ == 0) learn_scale(totals_.wait());  // in the first step: there is no previous one
    // With a hook a rank without samples looks whether any rank has some: it has nothing to compute meanwhile.
    if (batches_.samples > 0 && batches_.leading > 0) ask_the_others();
    skips_hook_ = options_.hook && batches_.samples == 0 && totals_.samples() == 0;
    looks_for_unused_ = some_are_unused_;
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

  // A plain loss.backward(), without begin(): every rank counts as one sample, and the end of backward() is the
  // finish(). Autograd holds `guard`; if it is gone before, backward() failed.
  void start_by_itself() {
    if (batches_.samples > 0)
      throw UsageError(
          {.what = "loss.backward() was called after ddp.backward() under no_sync()",
           .here = world_.describe(),
           .likely = "both kinds of backward() in one step: it is not known how many samples each rank has",
           .next = "use one of the two kinds in a step"});
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

  // ---- Virtual shards

  double begin_shard(const BatchWeight& batch, const torch::Tensor& loss) {
    if (losses_.size() == shards_.size()) throw too_many_backwards(shards_.size(), world_.describe());
    is_active_ = true;  // until end()
    of_shard_ = {};
    return of_shard_.add(batch, loss);
  }

  void end_shard() {
    for (Bucket& bucket : shards_[losses_.size()])
      for (Slot& slot : bucket.slots) slot.pack(of_shard_.samples > 0, of_shard_.weight());
    for (auto& [name, parameter] : trained_) parameter.mutable_grad().reset();
    batches_.samples += of_shard_.samples;
    ++batches_.backwards;
    losses_.push_back(of_shard_.loss_there());
    is_active_ = false;
  }

  // This rank's slice of all V shards, added up in their order. Rank i has shards i V/N ... (i + 1) V/N - 1.
  void sum_shards(size_t bucket) {
    Tensors received;  // [shard of a rank](rank, elements)
    for (const auto& buckets : shards_)
      received.push_back(world_.all_to_all(buckets[bucket].values.view({world_.size(), -1})));
    const torch::Tensor& slice = slices_->slice(bucket);
    slice.zero_();
    for (int rank = 0; rank < world_.size(); ++rank)
      for (const torch::Tensor& of_ranks : received) slice.add_(of_ranks[rank]);
  }

  // One number for each shard of all ranks, added up in their order.
  double sum_of_losses() const {
    const torch::Tensor losses = torch::zeros({options_.virtual_shards}, slices_->zero().options());
    for (size_t i = 0; i < losses_.size(); ++i)
      losses[world_.rank() * std::ssize(shards_) + to_int64(i)].copy_(losses_[i]);
    world_.all_reduce(losses);
    wait_for_device(world_);
    const torch::Tensor known = losses.cpu();
    return std::accumulate(known.const_data_ptr<double>(), known.const_data_ptr<double>() + options_.virtual_shards,
                           0.0);
  }

  // ---- During backward()

  // On one of autograd's threads, once for each gradient; there is one thread per device, hence the lock.
  void on_ready(Slot& slot) {
    const std::lock_guard lock(mutex_);
    if (failed_) throw after_failed_backward(world_.describe());
    if (is_accumulating_) return;
    if (!is_active_) start_by_itself();
    if (std::exchange(looks_for_unused_, false)) pack_unused(slot);
    if (slot.packed) throw ready_again(slot.parameter.name);
    if (++slot.times_ready == 1 && !order_is_known_) ready_order_.push_back(slot.index);
    if (slot.times_ready < times_expected(slot)) return;
    pack(slot);
    send_full_buckets();
  }

  // Parameters that this backward() will not reach would hold their buckets back until its end. Autograd knows them, but for
  // the node that it began with, which may be `ready`. With a static graph the first exchange has counted.
  void pack_unused(const Slot& ready) {
    const auto* const reached = torch::autograd::get_current_graph_task_nodes_in_graph();
    for_each_slot([&](Slot& slot) {
      const bool comes =
          options_.static_graph
              ? times_expected(slot) > 0
              : reached->contains(torch::autograd::impl::try_get_grad_accumulator(slot.parameter.tensor).get());
      if (&slot != &ready && !comes) pack(slot);
    });
  }

  // Counts how often a gradient becomes ready in one backward(). With a static graph the first exchange counts, and waits for
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

  void send(Bucket& bucket, size_t number) {
    const trace::Span span([&] {
      return trace::Event{.name = "send bucket", .number = to_int64(number), .bytes = to_int64(bucket.flat.nbytes())};
    });
    if (!first_sent_) first_sent_.emplace();
    bytes_ += to_int64(bucket.flat.nbytes() * shards_.size());
    if (options_.hook) {
      const torch::NoGradGuard no_grad;
      bucket.work.emplace(world_.all_reduce_async(bucket.flags));
      bucket.finish_hook = nullptr;
      if (!skips_hook_)
        bucket.finish_hook = options_.hook->start(world_, {.number = number,
                                                           .flat = bucket.values,
                                                           .parts = bucket.parts(),
                                                           .parameters = bucket.parameters(),
                                                           .is_last = number + 1 == shards_.front().size(),
                                                           .unit = scale_});
    } else if (slices_) {
      for (size_t i = 1; i < shards_.size(); ++i) bucket.flags.add_(shards_[i][number].flags);
      bucket.work.emplace(world_.all_reduce_async(bucket.flags));
      if (options_.virtual_shards > 0) return sum_shards(number);
      bucket.slice_work.emplace(world_.reduce_scatter_async(bucket.values, {.output = slices_->slice(number)}));
    } else {
      bucket.work.emplace(world_.all_reduce_async(bucket.flat, {.algorithm = options_.algorithm}));
    }
  }

  // ---- After backward()

  BatchTotals complete_exchange() {
    const std::lock_guard lock(mutex_);
    if (options_.virtual_shards > 0) start_exchange();
    pack_the_rest();
    BatchTotals totals = totals_.wait();
    if (options_.virtual_shards > 0) totals.mean_loss = sum_of_losses() / static_cast<double>(totals.samples);
    if (slices_)
      store_slices(totals.samples > 0 ? scale_ / totals_.divisor() : 0);
    else
      for (Bucket& bucket : buckets_) store_means(bucket, scale_ / totals_.divisor());
    for (const auto& [name, parameter] : sparse_) exchange_rows(parameter, totals);
    if (is_alone() && batches_.samples > 0)
      scale_own(batches_.weight(batches_.backwards - batches_.leading) / batches_.samples);
    if (first_sent_) seconds_ += first_sent_->seconds();
    learn_scale(totals);
    if (!order_is_known_ && !buckets_.empty()) follow_order_of_rank_0();
    forget_batches();
    return totals;
  }

  void forget_batches() {
    for_each_slot([](Slot& slot) {
      slot.packed = false;
      slot.times_ready = 0;
    });
    next_to_send_ = 0;
    first_sent_.reset();
    is_active_ = false;
    batches_ = {};
    losses_.clear();
  }

  // The graph shows only where this backward() had one: its batch may count nothing, after others that no_sync() added.
  void pack_the_rest() {
    bool has_graph = false;
    for_each_slot([&](const Slot& slot) { has_graph = has_graph || slot.times_ready > 0; });
    for_each_slot([&](Slot& slot) {
      if (!slot.packed) pack(slot);
      if (batches_.samples == 0 || !has_graph) return;
      if (slot.times_ready == 0) some_are_unused_ = true;
      if (options_.static_graph)
        times_ready_.try_emplace(slot.parameter.tensor.unsafeGetTensorImpl(), slot.times_ready);
    });
    send_full_buckets();
  }

  // s of the next step.
  void learn_scale(const BatchTotals& totals) {
    if (totals.samples > 0 && options_.virtual_shards == 0)
      scale_ = static_cast<double>(std::bit_floor(static_cast<uint64_t>(totals.samples)));
  }

  void pack(Slot& slot) const { slot.pack(batches_.samples > 0, weight()); }
  double weight() const {  // m_j / s
    return batches_.weight() / scale_;
  }

  // Slots of parameters that have a gradient on some rank. Where this one has all, nobody has to wait for a GPU.
  std::vector<Slot*> used_slots(Bucket& bucket) const {
    std::vector<Slot*> used;
    for (Slot& slot : bucket.slots) used.push_back(&slot);
    if (std::ranges::all_of(used, &Slot::is_used)) return used;
    wait_for_device(world_);
    const torch::Tensor ranks_with_gradient = bucket.flags.to(torch::kCPU, torch::kFloat32);
    const auto* count = ranks_with_gradient.const_data_ptr<float>();
    std::erase_if(used, [&](const Slot*) { return *count++ == 0; });
    return used;
  }

  void store_means(Bucket& bucket, double factor) {
    const torch::NoGradGuard no_grad;
    const trace::Span span("receive bucket", &bucket - buckets_.data());
    bucket.work->wait();
    if (bucket.finish_hook) bucket.finish_hook();
    for (Slot* slot : used_slots(bucket)) slot->store_mean(factor, options_.gradient_as_bucket_view);
  }

  // NCCL makes its calls in order: a rank that waits for the slice has waited for the flags.
  void store_slices(double factor) {
    const torch::NoGradGuard no_grad;
    Tensors used;
    for (size_t i = 0; i < buckets_.size(); ++i) {
      Bucket& bucket = buckets_[i];
      const trace::Span span("receive bucket", to_int64(i));
      (bucket.slice_work ? bucket.slice_work : bucket.work)->wait();
      torch::Tensor(slices_->slice(i)).mul_(factor);
      for (const Slot* slot : used_slots(bucket)) used.push_back(slot->parameter.tensor);
    }
    slices_->set_used(used);
  }

  // Alone there are no buckets: .grad is the sum of the batches. It is the mean already unless their sizes differ.
  void scale_own(double factor) const {
    const torch::NoGradGuard no_grad;
    for (const auto& [name, parameter] : trained_)
      if (factor != 1 && parameter.grad().defined()) parameter.grad().mul_(factor);
  }

  // Only now: how many rows there are is not known before.
  void exchange_rows(const torch::Tensor& parameter, const BatchTotals& totals) {
    if (totals.samples == 0) return;
    const double factor = batches_.samples > 0 ? batches_.weight() / totals_.divisor() : 0;
    const torch::Tensor mean = sum_of_rows(world_, parameter, factor);
    if (mean.defined()) bytes_ += to_int64(mean._values().nbytes());
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
    const int slices = plan_.slices ? std::max(options_.virtual_shards, world_.size()) : 0;
    const size_t usual = world_.device().is_cpu() && !options_.hook ? kCpuBucketBytes : kBucketBytes;
    const size_t bytes = options_.bucket_bytes > 0 ? options_.bucket_bytes : usual;
    for (auto& buckets : shards_) buckets = make_buckets(world_, parameters_, bytes, slices);
    if (options_.virtual_shards > 0) return;  // packed after each backward()
    auto index = std::ssize(parameters_);
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
    const uintptr_t key = accumulator->add_post_hook(std::make_unique<torch::autograd::utils::LambdaPostHook>(
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

  // Once, after the first exchange in which rank 0 had gradients: buckets are built anew, in the order in which these
  // became ready; other parameters come last. Not with a hook, which keeps memory for each bucket, nor with slices,
  // whose optimizer state lies as the buckets do.
  void follow_order_of_rank_0() {
    order_is_known_ = options_.hook || slices_;
    if (order_is_known_) return;
    std::vector<int64_t> ready = std::exchange(ready_order_, {});
    const bool had_gradients = !ready.empty();
    for (int64_t i = 0; i < std::ssize(parameters_); ++i)
      if (std::find(ready.begin(), ready.end(), i) == ready.end()) ready.push_back(i);
    ready.push_back(had_gradients ? 1 : 0);
    wait_for_device(world_);
    const torch::Tensor order = torch::tensor(ready, torch::kInt64).to(world_.device());
    world_.broadcast(order);
    const torch::Tensor in_order = order.flip(0).cpu();
    const auto* index = in_order.const_data_ptr<int64_t>();
    order_is_known_ = *index++ > 0;
    if (!order_is_known_) return;
    NamedTensors sorted;
    for (int64_t i = 0; i < std::ssize(parameters_); ++i) sorted.push_back(parameters_[index[i]]);
    parameters_ = std::move(sorted);
    build_buckets();
  }

  UsageError ready_again(const std::string& name) const {
    return UsageError(
        {.what = concat("the gradient of ", name, " became ready again after it was sent"),
         .here = world_.describe(),
         .likely =
             "a backward() inside of backward(), such as activation checkpointing; with static_graph a graph that is "
             "not the one of the first step",
         .next = "static_graph = true if every step is like the first; else one backward() per step, on the sum of the "
                 "losses"});
  }

  // ---- In step()

  void require_slices_exchanged() const {
    if (!is_exchanged_)
      throw UsageError({.what = "step() without gradients that were exchanged since the last one",
                        .here = world_.describe(),
                        .likely = "no_sync() around the last backward() before step(), or step() called twice",
                        .next = "let a backward() outside of no_sync() come before each step()"});
    watch_.require_unchanged();
  }

  // .grad is this rank's own since no_sync(), or was written after the last step().
  static void require_nothing_to_step(const Tensors& parameters) {
    if (!std::ranges::all_of(parameters, [](const torch::Tensor& p) { return is_zero(p.grad()); }))
      throw UsageError(
          {.what = "step() with gradients that were not exchanged, on parameters that the ranks share",
           .likely = "no_sync() around the last backward() before step(), or a .grad that was set by hand",
           .next = "let a backward() outside of no_sync() come before each step(); or set share_parameters = false"});
  }

  World world_;
  NamedTensors all_;
  NamedTensors trained_;     // require a gradient
  NamedTensors parameters_;  // of these, those whose gradients go through buckets
  NamedTensors sparse_;      // the others, whose gradients are exchanged row by row
  DistributedDataParallelOptions options_;
  BucketPlan plan_;
  std::vector<std::vector<Bucket>> shards_;           // buckets of each virtual shard of this rank; else one list
  std::vector<Bucket>& buckets_;                      // the first of them
  std::shared_ptr<GradientSlices> slices_;            // the optimizer has it, too
  bool order_is_known_ = false;                       // buckets fill in the order in which gradients become ready
  std::vector<int64_t> ready_order_;                  // in the first exchange: indices of parameters
  std::unordered_map<const void*, int> times_ready_;  // with a static graph: of each parameter, once it is known
  bool some_are_unused_ = false;                      // some step left a parameter out: later ones look for such
  std::vector<std::pair<NodePtr, uintptr_t>> hooks_;  // accumulator, key
  bool is_accumulating_ = false;  // in a backward() that exchanges nothing; changes only while no backward() runs

  std::mutex mutex_;                     // guards what follows, and the buckets
  bool is_active_ = false;               // between begin and finish
  bool failed_ = false;                  // cancel() was called
  bool looks_for_unused_ = false;        // at the first gradient of this backward()
  AccumulatedBatches batches_;           // since the last exchange
  GradientWatch accumulated_{trained_};  // of .grad after a backward() that exchanged nothing
  ExchangeTotals totals_;
  bool skips_hook_ = false;              // in this exchange: no rank has samples, and residuals stay as they are
  std::optional<Stopwatch> first_sent_;  // since the first bucket of this exchange was sent
  double scale_;                         // s; 0 before the first step with samples
  size_t next_to_send_ = 0;

  AccumulatedBatches of_shard_;  // of the shard whose backward() runs
  Tensors losses_;               // of this step's shards so far, times samples

  StepAgreement agreement_;
  LocalGradients in_grad_;
  GradientWatch watch_{all_};      // of .grad since the last exchange
  bool is_exchanged_;              // what step() will use
  bool has_stepped_ = false;       // since the last exchange
  bool mean_was_changed_ = false;  // by hand, before the last step
};

}  // namespace

std::shared_ptr<Exchange> exchange_in_buckets(World world, const NamedTensors& parameters,
                                              const DistributedDataParallelOptions& options, const BucketPlan& plan) {
  return std::make_shared<Buckets>(std::move(world), parameters, options, plan);
}

}  // namespace lockstep
