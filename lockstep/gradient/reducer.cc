#include "lockstep/gradient/reducer.h"

#include <algorithm>
#include <bit>
#include <functional>
#include <limits>
#include <mutex>
#include <optional>

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include "lockstep/base/error.h"
#include "lockstep/base/text.h"

namespace lockstep {
namespace {

// Where a parameter's gradient lies in its bucket.
struct Slot {
  NamedTensor parameter;
  torch::Tensor gradient;  // (numel) view into the bucket
  torch::Tensor flag;      // (1) view into the bucket: afterwards the number of ranks that have a gradient
  std::size_t index = 0;   // of the parameter
  bool ready = false;
};

// One flat tensor: the gradients of its parameters one after another, then a flag for each.
struct Bucket {
  torch::Tensor flat;
  torch::Tensor values;  // its gradients: a view
  torch::Tensor flags;   // (slots) view
  std::vector<Slot> slots;
  std::size_t pending = 0;
  std::optional<Work> work;          // all of it; with a hook, the flags alone
  CommunicationHook::Finish finish;  // with a hook
};

bool fits(const std::vector<NamedTensor>& bucket, const NamedTensor& next, std::size_t bytes, std::size_t limit) {
  if (bucket.empty()) return true;
  const torch::Tensor& first = bucket.front().tensor;
  return bytes + next.tensor.nbytes() <= limit && first.dtype() == next.tensor.dtype() &&
         first.device() == next.tensor.device();
}

std::vector<std::vector<NamedTensor>> cut_into_buckets(const std::vector<NamedTensor>& parameters, std::size_t limit) {
  std::vector<std::vector<NamedTensor>> buckets;
  std::size_t bytes = 0;
  for (auto parameter = parameters.rbegin(); parameter != parameters.rend(); ++parameter) {
    if (buckets.empty() || !fits(buckets.back(), *parameter, bytes, limit)) {
      buckets.emplace_back();
      bytes = 0;
    }
    buckets.back().push_back(*parameter);
    bytes += parameter->tensor.nbytes();
  }
  return buckets;
}

Bucket make_bucket(const World& world, const std::vector<NamedTensor>& parameters) {
  std::int64_t values = 0;
  for (const auto& [name, tensor] : parameters) values += tensor.numel();
  const auto count = static_cast<std::int64_t>(parameters.size());
  Bucket bucket;
  bucket.flat = world.allocate({values + count}, parameters.front().tensor.options().requires_grad(false)).zero_();
  bucket.values = bucket.flat.narrow(0, 0, values);
  bucket.flags = bucket.flat.narrow(0, values, count);
  std::int64_t offset = 0;
  for (const auto& parameter : parameters) {
    const auto index = static_cast<std::int64_t>(bucket.slots.size());
    bucket.slots.push_back({.parameter = parameter,
                            .gradient = bucket.flat.narrow(0, offset, parameter.tensor.numel()),
                            .flag = bucket.flags.narrow(0, index, 1)});
    offset += parameter.tensor.numel();
  }
  return bucket;
}

// The gradient's values in the parameter's memory order. Autograd keeps to that order by itself, save for gradients that
// were put there by hand or made with create_graph.
torch::Tensor in_parameter_order(const NamedTensor& parameter, const torch::Tensor& gradient) {
  if (gradient.layout() != torch::kStrided)
    throw UsageError({.what = concat("the gradient of ", parameter.name, " is sparse; only dense ones are exchanged"),
                      .likely = "an Embedding with sparse(true)",
                      .next = "make it with sparse(false)"});
  if (gradient.strides() == parameter.tensor.strides()) return dense_view(gradient);
  return dense_view(torch::empty_like(parameter.tensor).copy_(gradient));
}

// (m, m loss) in float64, on the parameters' device: so that a GPU need not be waited for.
torch::Tensor make_totals(const LocalBatch& batch, torch::Device device) {
  const auto options = torch::TensorOptions().dtype(torch::kFloat64).device(device);
  const torch::Tensor loss = batch.weighted_loss.defined() ? batch.weighted_loss.reshape({}).to(options)
                                                           : torch::zeros({}, options);
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
  Impl(World world, std::vector<NamedTensor> parameters, const ReducerOptions& options, OnFinished on_finished)
      : world_(std::move(world)),
        parameters_(std::move(parameters)),
        options_(options),
        on_finished_(std::move(on_finished)) {
    if (world_.size() > 1) build_buckets();
  }

  ~Impl() { remove_hooks(); }

  std::int64_t bytes_exchanged() const { return bytes_exchanged_; }

  torch::Tensor begin(std::int64_t samples, const torch::Tensor& loss) {
    const std::lock_guard lock(mutex_);
    if (active_) throw unfinished();
    const torch::Tensor seed = batch_.add(samples, loss);
    start_exchange();
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
    for (Bucket& bucket : buckets_)
      for (Slot& slot : bucket.slots)
        if (!slot.ready) pack(bucket, slot);
    send_full_buckets();
    const BatchTotals totals = wait_for_totals();
    for (Bucket& bucket : buckets_) take_back(bucket, scale_ / static_cast<double>(totals.samples));
    learn_scale(totals);
    if (!order_is_real_ && !buckets_.empty()) follow_real_order();
    active_ = false;
    batch_ = {};
    return totals;
  }

  // Parameters are in the reverse of the order in which buckets shall fill.
  void build_buckets() {
    for (const auto& group : cut_into_buckets(parameters_, options_.bucket_bytes))
      buckets_.push_back(make_bucket(world_, group));
    std::size_t index = parameters_.size();
    for (Bucket& bucket : buckets_)
      for (Slot& slot : bucket.slots) {
        slot.index = --index;
        install_hook(bucket, slot);
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
    buckets_.clear();
    build_buckets();
  }

  void install_hook(Bucket& bucket, Slot& slot) {
    auto accumulator = torch::autograd::impl::grad_accumulator(slot.parameter.tensor);
    auto hook = std::make_unique<ReadyHook>([this, &bucket, &slot] { on_ready(bucket, slot); });
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
    for (Bucket& bucket : buckets_) {
      bucket.pending = bucket.slots.size();
      for (Slot& slot : bucket.slots) slot.ready = false;
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
  void on_ready(Bucket& bucket, Slot& slot) {
    const std::lock_guard lock(mutex_);
    if (paused_) return;
    if (!active_) start_by_itself();
    if (slot.ready) throw ready_twice(slot.parameter.name);
    if (!order_is_real_) ready_order_.push_back(static_cast<std::int64_t>(slot.index));
    pack(bucket, slot);
    send_full_buckets();
  }

  UsageError unfinished() const {
    return UsageError({.what = "backward() was called after one that failed half-way",
                       .here = world_.describe(),
                       .likely = "an exception in backward() that was caught and passed over",
                       .next = "let it end the program, and go on from a checkpoint"});
  }

  UsageError ready_twice(const std::string& name) const {
    return UsageError({.what = concat("the gradient of ", name, " became ready twice in one backward()"),
                       .here = world_.describe(),
                       .likely = "a backward() inside of backward(), such as activation checkpointing",
                       .next = "call backward() once per step, on the sum of the losses"});
  }

  // A rank without samples sends zeros whatever its gradients hold: 0 * NaN would be NaN.
  void pack(Bucket& bucket, Slot& slot) {
    const torch::NoGradGuard no_grad;
    const torch::Tensor& gradient = slot.parameter.tensor.grad();
    const bool has_one = gradient.defined() && batch_.samples > 0;
    if (has_one)
      at::mul_out(slot.gradient, in_parameter_order(slot.parameter, gradient), torch::scalar_tensor(weight(), torch::kFloat64));
    else
      slot.gradient.zero_();
    slot.flag.fill_(has_one ? 1 : 0);
    slot.ready = true;
    --bucket.pending;
  }

  // In order, so that every rank sends the same bucket next.
  void send_full_buckets() {
    for (; next_to_send_ < buckets_.size() && buckets_[next_to_send_].pending == 0; ++next_to_send_) send(next_to_send_);
  }

  void send(std::size_t number) {
    Bucket& bucket = buckets_[number];
    bytes_exchanged_ += static_cast<std::int64_t>(bucket.flat.nbytes());
    if (options_.hook) {
      const torch::NoGradGuard no_grad;
      bucket.work.emplace(world_.all_reduce_async(bucket.flags));
      bucket.finish = options_.hook->start(world_, {number, bucket.values, parts_of(bucket)});
    } else {
      bucket.work.emplace(world_.all_reduce_async(bucket.flat, {.algorithm = options_.algorithm}));
    }
  }

  // The gradients in memory order: the first dimension of a parameter stays the first also where channels are last.
  static std::vector<torch::Tensor> parts_of(const Bucket& bucket) {
    std::vector<torch::Tensor> parts;
    for (const Slot& slot : bucket.slots) {
      const torch::Tensor& parameter = slot.parameter.tensor;
      const bool matrix = parameter.dim() > 1 && parameter.numel() > 0;
      parts.push_back(matrix ? slot.gradient.view({parameter.size(0), -1}) : slot.gradient);
    }
    return parts;
  }

  void take_back(Bucket& bucket, double factor) {
    const torch::NoGradGuard no_grad;
    bucket.work->wait();
    if (bucket.finish) bucket.finish();
    const torch::Tensor ranks_with_gradient = bucket.flags.to(torch::kCPU, torch::kFloat32);
    const auto* count = ranks_with_gradient.const_data_ptr<float>();
    for (Slot& slot : bucket.slots)
      if (*count++ > 0) store_mean(slot, factor);
  }

  void store_mean(Slot& slot, double factor) {
    const torch::Tensor& parameter = slot.parameter.tensor;
    torch::Tensor& gradient = parameter.mutable_grad();
    if (!gradient.defined() || gradient.strides() != parameter.strides())
      gradient = torch::empty_like(parameter, parameter.options().requires_grad(false));
    torch::Tensor values = dense_view(gradient);
    at::mul_out(values, slot.gradient, torch::scalar_tensor(factor, torch::kFloat64));
  }

  World world_;
  std::vector<NamedTensor> parameters_;
  ReducerOptions options_;
  OnFinished on_finished_;
  std::vector<Bucket> buckets_;
  bool order_is_real_ = false;            // buckets fill in the order in which gradients become ready
  std::vector<std::int64_t> ready_order_;  // of the first exchange: indices of parameters
  std::int64_t bytes_exchanged_ = 0;
  std::vector<std::pair<std::shared_ptr<torch::autograd::Node>, std::uintptr_t>> hooks_;

  std::mutex mutex_;             // guards what follows, and the buckets: autograd may have a thread per device
  bool active_ = false;          // between begin and finish
  bool paused_ = false;          // gradients only add up
  LocalBatch batch_;             // m_j and the loss, since the last exchange
  torch::Tensor totals_;         // (n, sum of m_j loss_j) once totals_work_ is done
  std::optional<Work> totals_work_;
  double scale_ = 0;             // s; 0 before the first step with samples
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
std::int64_t Reducer::bytes_exchanged() const { return impl_->bytes_exchanged(); }

}  // namespace lockstep
