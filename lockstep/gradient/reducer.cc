#include "lockstep/gradient/reducer.h"

#include <algorithm>
#include <bit>
#include <functional>
#include <limits>
#include <mutex>
#include <optional>
#include <unordered_map>

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include "lockstep/base/text.h"
#include "lockstep/deadline.h"
#include "lockstep/error.h"
#include "lockstep/gradient/bucket.h"
#include "lockstep/gradient/sparse_exchange.h"
#include "lockstep/gradient/unused_parameters.h"

namespace lockstep {
namespace {

// A bucket and the exchange of it that runs.
struct Exchange {
  Bucket bucket;
  std::optional<Work> work{};          // all of it; with a hook, the flags alone
  CommunicationHook::Finish finish{};  // with a hook
};

// (m, m loss) in float64, on the parameters' device: so that a GPU need not be waited for.
torch::Tensor make_totals(const AccumulatedBatches& batch, torch::Device device) {
  const auto options = torch::TensorOptions().dtype(torch::kFloat64).device(device);
  const torch::Tensor loss =
      batch.weighted_loss.defined() ? batch.weighted_loss.reshape({}).to(options) : torch::zeros({}, options);
  return torch::stack({torch::full({}, batch.samples, options), loss});
}

// Calls back once a parameter's gradient has been accumulated.
class ReadyHook : public torch::autograd::FunctionPostHook {
 public:
  explicit ReadyHook(std::function<void()> ready) : ready_(std::move(ready)) {}
  torch::autograd::variable_list operator()(const torch::autograd::variable_list& outputs,
                                            const torch::autograd::variable_list&) override {
    ready_();
    return outputs;
  }

 private:
  std::function<void()> ready_;
};

}  // namespace

class Reducer::Impl {
 public:
  // In a world of one there is nothing to exchange: no buckets, no hooks.
  Impl(World world, const std::vector<NamedTensor>& parameters, const ReducerOptions& options, OnFinished on_finished)
      : world_(std::move(world)), options_(options), on_finished_(std::move(on_finished)) {
    const auto is_sparse = [&](const NamedTensor& parameter) { return options_.sparse.contains(parameter.name); };
    if (world_.size() == 1) return;
    std::copy_if(parameters.begin(), parameters.end(), std::back_inserter(sparse_), is_sparse);
    std::remove_copy_if(parameters.begin(), parameters.end(), std::back_inserter(parameters_), is_sparse);
    build_buckets();
  }

  ~Impl() { remove_hooks(); }

  const ReducerStatistics& statistics() const { return statistics_; }

  torch::Tensor begin(std::int64_t samples, const torch::Tensor& loss) {
    const std::lock_guard lock(mutex_);
    if (active_) throw unfinished();
    const torch::Tensor seed = batch_.add(samples, loss);
    start_exchange();
    if (some_are_unused_) pack_unused(loss);
    return seed;
  }

  torch::Tensor begin_without_exchange(std::int64_t samples, const torch::Tensor& loss) {
    const std::lock_guard lock(mutex_);
    if (active_) throw unfinished();
    paused_ = true;
    return batch_.add(samples, loss);
  }

  void resume() {
    const std::lock_guard lock(mutex_);
    paused_ = false;
  }

  BatchTotals finish() {
    const BatchTotals totals = complete_exchange();
    if (on_finished_) on_finished_(totals);
    return totals;
  }

 private:
  BatchTotals complete_exchange() {
    const std::lock_guard lock(mutex_);
    pack_the_rest();
    const BatchTotals totals = wait_for_totals();
    for (Exchange& exchange : exchanges_) take_back(exchange, scale_ / static_cast<double>(totals.samples));
    for (const auto& [name, parameter] : sparse_) exchange_rows(parameter, totals);
    if (first_sent_) statistics_.exchange_seconds += first_sent_->seconds();
    learn_scale(totals);
    if (!order_is_real_ && !exchanges_.empty()) follow_real_order();
    active_ = false;
    batch_ = {};
    return totals;
  }

  // Parameters are in the reverse of the order in which buckets shall fill.
  void build_buckets() {
    for (Bucket& bucket : make_buckets(world_, parameters_, options_.bucket_bytes))
      exchanges_.push_back({std::move(bucket)});
    std::size_t index = parameters_.size();
    for (Exchange& exchange : exchanges_)
      for (Slot& slot : exchange.bucket.slots) {
        slot.index = --index;
        install_hook(slot);
      }
  }

  void remove_hooks() {
    for (const auto& [accumulator, key] : hooks_) accumulator->del_post_hook(key);
    hooks_.clear();
  }

  // Once, after the first exchange: rank 0's order for all. A hook keeps memory for each bucket, so there they stay.
  void follow_real_order() {
    order_is_real_ = true;
    if (options_.hook) return;
    for (std::int64_t i = 0; i < static_cast<std::int64_t>(parameters_.size()); ++i)
      if (std::find(ready_order_.begin(), ready_order_.end(), i) == ready_order_.end()) ready_order_.push_back(i);
    const torch::Tensor order = torch::tensor(ready_order_, torch::kInt64).to(world_.device());
    world_.broadcast(order);
    const torch::Tensor on_host = order.cpu();
    std::vector<NamedTensor> sorted;
    for (std::int64_t i = on_host.numel() - 1; i >= 0; --i)
      sorted.push_back(parameters_[static_cast<std::size_t>(on_host[i].item<std::int64_t>())]);
    parameters_ = std::move(sorted);
    remove_hooks();
    exchanges_.clear();
    build_buckets();
  }

  void install_hook(Slot& slot) {
    auto accumulator = torch::autograd::impl::grad_accumulator(slot.parameter.tensor);
    auto hook = std::make_unique<ReadyHook>([this, &slot] { on_ready(slot); });
    const std::uintptr_t key = accumulator->add_post_hook(std::move(hook));
    hooks_.emplace_back(std::move(accumulator), key);
  }

  // A plain loss.backward(), without begin(): every rank counts the same, and the end of backward() is the finish().
  void start_by_itself() {
    batch_.add_unknown();
    start_exchange();
    torch::autograd::Engine::get_default_engine().queue_callback([this] { finish(); });
  }

  void start_exchange() {
    const torch::NoGradGuard no_grad;
    totals_ = make_totals(batch_, world_.device());
    totals_work_.emplace(world_.all_reduce_async(totals_));
    if (scale_ == 0) learn_scale(wait_for_totals());  // the first step has none before it
    next_to_send_ = 0;
    first_sent_.reset();
    for (Exchange& exchange : exchanges_)
      for (Slot& slot : exchange.bucket.slots) {
        slot.packed = false;
        slot.times_ready = 0;
      }
    active_ = true;
  }

  BatchTotals wait_for_totals() {
    if (totals_work_) totals_work_->wait();
    totals_work_.reset();
    const torch::Tensor totals = totals_.cpu();
    const auto* values = totals.const_data_ptr<double>();
    return {static_cast<std::int64_t>(values[0]), values[1] / values[0]};
  }

  void learn_scale(const BatchTotals& totals) {
    if (totals.samples > 0) scale_ = static_cast<double>(std::bit_floor(static_cast<std::uint64_t>(totals.samples)));
  }

  double weight() const { return batch_.weight() / scale_; }  // m_j / s

  // On autograd's thread.
  void on_ready(Slot& slot) {
    const std::lock_guard lock(mutex_);
    if (paused_) return;
    if (!active_) start_by_itself();
    if (slot.packed) throw ready_again(slot.parameter.name);
    if (++slot.times_ready == 1 && !order_is_real_) ready_order_.push_back(static_cast<std::int64_t>(slot.index));
    if (slot.times_ready < times_expected(slot)) return;
    slot.pack(batch_.samples > 0, weight());
    send_full_buckets();
  }

  // How often a gradient becomes ready in one backward(). With a static graph the first exchange, which waits for its
  // end, tells; later ones need not.
  int times_expected(const Slot& slot) const {
    if (!options_.static_graph) return 1;
    const auto found = times_ready_.find(slot.parameter.tensor.unsafeGetTensorImpl());
    return found == times_ready_.end() ? std::numeric_limits<int>::max() : found->second;
  }

  // Those that this backward() will not reach would keep their buckets back to its end.
  void pack_unused(const torch::Tensor& loss) {
    const auto reached = reached_by(loss);
    for (Exchange& exchange : exchanges_)
      for (Slot& slot : exchange.bucket.slots)
        if (!reached(slot.parameter.tensor)) slot.pack(batch_.samples > 0, weight());
    send_full_buckets();
  }

  void pack_the_rest() {
    for (Exchange& exchange : exchanges_)
      for (Slot& slot : exchange.bucket.slots) {
        if (!slot.packed) slot.pack(batch_.samples > 0, weight());
        if (batch_.samples == 0) continue;
        if (slot.times_ready == 0) some_are_unused_ = true;
        if (options_.static_graph)
          times_ready_.try_emplace(slot.parameter.tensor.unsafeGetTensorImpl(), slot.times_ready);
      }
    send_full_buckets();
  }

  UsageError unfinished() const {
    return UsageError({.what = "backward() was called after one that failed half-way",
                       .here = world_.describe(),
                       .likely = "an exception in backward() that was caught and passed over",
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

  // In order, so that every rank sends the same bucket next.
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

  void take_back(Exchange& exchange, double factor) {
    const torch::NoGradGuard no_grad;
    exchange.work->wait();
    if (exchange.finish) exchange.finish();
    const torch::Tensor ranks_with_gradient = exchange.bucket.flags.to(torch::kCPU, torch::kFloat32);
    const auto* count = ranks_with_gradient.const_data_ptr<float>();
    for (Slot& slot : exchange.bucket.slots)
      if (*count++ > 0) slot.store_mean(factor, options_.gradient_as_bucket_view);
  }

  // After backward(): how many rows there are is not known before.
  void exchange_rows(const torch::Tensor& parameter, const BatchTotals& totals) {
    if (totals.samples == 0) return;
    const double factor = batch_.samples > 0 ? batch_.weight() / static_cast<double>(totals.samples) : 0;
    const torch::Tensor mean = sum_of_rows(world_, parameter, factor);
    if (mean.defined()) statistics_.bytes += static_cast<std::int64_t>(mean._values().nbytes());
    parameter.mutable_grad() = mean;
  }

  World world_;
  std::vector<NamedTensor> parameters_;  // whose gradients go through buckets
  std::vector<NamedTensor> sparse_;      // whose gradients are exchanged row by row
  ReducerOptions options_;
  OnFinished on_finished_;
  std::vector<Exchange> exchanges_;                   // of each bucket
  bool order_is_real_ = false;                        // buckets fill in the order in which gradients become ready
  std::vector<std::int64_t> ready_order_;             // of the first exchange: indices of parameters
  std::unordered_map<const void*, int> times_ready_;  // of each parameter, with a static graph: once it is known
  bool some_are_unused_ = false;  // some step left a parameter out: later ones look for such before backward()
  ReducerStatistics statistics_;
  std::vector<std::pair<std::shared_ptr<torch::autograd::Node>, std::uintptr_t>> hooks_;

  std::mutex mutex_;      // guards what follows, and the buckets: autograd may have a thread per device
  bool active_ = false;   // between begin and finish
  bool paused_ = false;   // gradients only add up
  AccumulatedBatches batch_;      // m_j and the loss, since the last exchange
  torch::Tensor totals_;  // (n, sum of m_j loss_j) once totals_work_ is done
  std::optional<Work> totals_work_;
  std::optional<Stopwatch> first_sent_;  // when the first bucket of this exchange was
  double scale_ = 0;                     // s; 0 before the first step with samples
  std::size_t next_to_send_ = 0;
};

Reducer::Reducer(World world, const std::vector<NamedTensor>& parameters, const ReducerOptions& options,
                 OnFinished on_finished)
    : impl_(std::make_unique<Impl>(std::move(world), parameters, options, std::move(on_finished))) {}
Reducer::~Reducer() = default;
torch::Tensor Reducer::begin(std::int64_t samples, const torch::Tensor& loss) { return impl_->begin(samples, loss); }
torch::Tensor Reducer::begin_without_exchange(std::int64_t samples, const torch::Tensor& loss) {
  return impl_->begin_without_exchange(samples, loss);
}
void Reducer::resume() { impl_->resume(); }
BatchTotals Reducer::finish() { return impl_->finish(); }
const ReducerStatistics& Reducer::statistics() const { return impl_->statistics(); }

}  // namespace lockstep
