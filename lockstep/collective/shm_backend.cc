#include "lockstep/collective/shm_backend.h"

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>

#include <ATen/core/ivalue.h>
#include <ATen/core/jit_type.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include "lockstep/base/error.h"
#include "lockstep/base/file.h"
#include "lockstep/base/text.h"
#include "lockstep/collective/shm/group.h"
#include "lockstep/collective/shm/rendezvous.h"
#include "lockstep/collective/shm_dtype.h"

namespace lockstep {
namespace {

using c10d::OpType;
using Tensor = ShmBackend::Tensor;
using Tensors = ShmBackend::Tensors;
using WorkPtr = ShmBackend::WorkPtr;

// ---- What torch calls things, in the core's words

shm::ReduceOp to_shm(const c10d::ReduceOp& op) {
  switch (op.op_) {
    case c10d::ReduceOp::SUM:
    case c10d::ReduceOp::PREMUL_SUM: return shm::ReduceOp::kSum;  // scaled() multiplies
    case c10d::ReduceOp::AVG: return shm::ReduceOp::kMean;
    case c10d::ReduceOp::PRODUCT: return shm::ReduceOp::kProduct;
    case c10d::ReduceOp::MIN: return shm::ReduceOp::kMin;
    case c10d::ReduceOp::MAX: return shm::ReduceOp::kMax;
    case c10d::ReduceOp::BAND: return shm::ReduceOp::kBitAnd;
    case c10d::ReduceOp::BOR: return shm::ReduceOp::kBitOr;
    case c10d::ReduceOp::BXOR: return shm::ReduceOp::kBitXor;
    case c10d::ReduceOp::UNUSED: break;
  }
  throw UsageError({.what = "a reduction that c10d does not define", .next = "use one of torch.distributed.ReduceOp"});
}

// How elements of a tensor travel: `each` elements of `dtype` per element of torch's.
struct Unit {
  shm::DType dtype;
  std::size_t each = 1;

  std::size_t count(std::int64_t elements) const { return static_cast<std::size_t>(elements) * each; }
};

Unit unit_to_move(const Tensor& tensor) {
  if (const auto dtype = to_shm_dtype(tensor.scalar_type())) return {*dtype};
  return {shm::DType::kUInt8, static_cast<std::size_t>(tensor.element_size())};
}

Unit unit_to_reduce(const Tensor& tensor, const c10d::ReduceOp& op) {
  const at::ScalarType dtype = tensor.scalar_type();
  const bool as_real = at::isComplexType(dtype) && c10d::isComplexViewAsRealAllowed(op);
  if (const auto known = to_shm_dtype(as_real ? c10::toRealValueType(dtype) : dtype)) return {*known, as_real ? 2U : 1U};
  throw UsageError({.what = concat("this reduction is not defined for tensors of ", c10::toString(dtype)),
                    .next = "convert the tensor, or choose another reduction"});
}

void check_tensor(const Tensor& tensor) {
  if (!tensor.is_cpu())
    throw DeviceError({.what = concat("a tensor on ", tensor.device().str(), " was given to the lockstep backend"),
                       .likely = "a model on a GPU in a process group that is for the CPU only",
                       .next = "move it to the CPU, or use init_process_group(\"cpu:lockstep,cuda:nccl\")"});
  if (tensor.layout() != at::kStrided)
    throw UsageError({.what = concat("a tensor of layout ", c10::str(tensor.layout()), " can't be exchanged"),
                      .next = "call to_dense() on it first"});
}

const Tensor& only_one(const Tensors& tensors, const char* what) {
  if (tensors.size() == 1) return tensors.front();
  throw UsageError({.what = concat(tensors.size(), " ", what, " tensors, where one is needed"),
                    .next = "call it once per tensor, or its coalesced form"});
}

const Tensors& only_one(const std::vector<Tensors>& lists, const char* what) {
  if (lists.size() == 1) return lists.front();
  throw UsageError({.what = concat(lists.size(), " lists of ", what, " tensors, where one is needed"),
                    .next = "give one tensor per rank"});
}

// ---- Tensors as memory

// Some tensors of one dtype, one after the other, as one piece of memory: where they lie, if they are one; else a copy.
class Piece {
 public:
  Piece() = default;
  explicit Piece(Tensors tensors, bool must_copy = false) : tensors_(std::move(tensors)) {
    for (const Tensor& tensor : tensors_) {
      check_tensor(tensor);
      if (tensor.scalar_type() != tensors_.front().scalar_type())
        throw UsageError({.what = concat("one call with tensors of ", c10::toString(tensor.scalar_type()), " and of ",
                                         c10::toString(tensors_.front().scalar_type())),
                          .next = "convert them to one dtype"});
    }
    if (!tensors_.empty() && (must_copy || !lie_together())) copy_ = at::empty({elements()}, tensors_.front().dtype());
  }

  const Tensor& first() const { return tensors_.front(); }

  void* memory() const {
    if (copy_.defined()) return copy_.mutable_data_ptr();
    return tensors_.empty() ? nullptr : tensors_.front().mutable_data_ptr();
  }

  std::int64_t elements() const {
    std::int64_t sum = 0;
    for (const Tensor& tensor : tensors_) sum += tensor.numel();
    return sum;
  }

  bool overlaps(const Piece& other) const {
    const auto* const mine = static_cast<const std::byte*>(memory());
    const auto* const theirs = static_cast<const std::byte*>(other.memory());
    return mine < theirs + other.bytes() && theirs < mine + bytes();
  }

  void copy_in() const {
    for_each_part([](const Tensor& tensor, const Tensor& part) { part.copy_(tensor); });
  }
  void copy_out() const {
    for_each_part([](const Tensor& tensor, const Tensor& part) { tensor.copy_(part); });
  }

 private:
  std::size_t bytes() const {
    return tensors_.empty() ? 0 : static_cast<std::size_t>(elements()) * tensors_.front().element_size();
  }

  bool lie_together() const {
    const auto* next = static_cast<const std::byte*>(tensors_.front().const_data_ptr());
    for (const Tensor& tensor : tensors_) {
      if (!tensor.is_contiguous() || tensor.is_conj() || tensor.is_neg()) return false;
      if (tensor.numel() > 0 && tensor.const_data_ptr() != next) return false;
      next += tensor.nbytes();
    }
    return true;
  }

  template <class Body>
  void for_each_part(const Body& body) const {
    if (!copy_.defined()) return;
    const at::AutoDispatchBelowADInplaceOrView no_autograd;
    std::int64_t begin = 0;
    for (const Tensor& tensor : tensors_) {
      body(tensor, copy_.narrow(0, begin, tensor.numel()).view(tensor.sizes()));
      begin += tensor.numel();
    }
  }

  Tensors tensors_;
  Tensor copy_;
};

// The core takes input and output that are the same memory, or have none in common: anything else is copied first.
Piece input_beside(const Tensors& inputs, const Piece& output) {
  Piece input(inputs);
  if (input.memory() != output.memory() && input.overlaps(output)) return Piece(inputs, true);
  return input;
}

// PREMUL_SUM: every rank's tensor times a factor, then summed.
Tensor scaled(const Tensor& tensor, const c10d::ReduceOp& op) {
  if (op.op_ != c10d::ReduceOp::PREMUL_SUM) return tensor;
  const auto* const factor = dynamic_cast<const c10d::NCCLPreMulSumSupplement*>(op.supplement_.get());
  if (factor == nullptr)
    throw UsageError({.what = "PREMUL_SUM without a factor", .next = "make it with makeNCCLPreMulSum"});
  const at::AutoDispatchBelowADInplaceOrView no_autograd;
  const Tensor product =
      factor->tensor_factor.defined() ? tensor * factor->tensor_factor : tensor * factor->double_factor;
  return product.to(tensor.scalar_type());
}

Tensors scaled(const Tensors& tensors, const c10d::ReduceOp& op) {
  Tensors all;
  for (const Tensor& tensor : tensors) all.push_back(scaled(tensor, op));
  return all;
}

// The counts of the core for a whole that is a part per rank, one after the other.
struct Counts {
  std::size_t even = 0;
  std::vector<std::size_t> each;  // none: all are `even`

  std::size_t of(int rank) const { return each.empty() ? even : each[static_cast<std::size_t>(rank)]; }
};

Counts counts_of_one(const Tensor& whole, int size, Unit unit) {
  if (whole.numel() % size == 0) return {unit.count(whole.numel() / size), {}};
  throw UsageError({.what = concat("a tensor of ", whole.numel(), " elements is no equal parts for ", size, " ranks"),
                    .next = "make its size a multiple of the number of ranks"});
}

// `whole` is a tensor per rank, or one tensor for all.
Counts counts_of(const Tensors& whole, int size, Unit unit) {
  if (whole.size() == 1) return counts_of_one(whole.front(), size, unit);
  if (whole.size() != static_cast<std::size_t>(size))
    throw UsageError(
        {.what = concat(whole.size(), " tensors for ", size, " ranks"), .next = "give one tensor per rank"});
  std::vector<std::size_t> each;
  for (const Tensor& part : whole) each.push_back(unit.count(part.numel()));
  const bool even = std::ranges::all_of(each, [&](std::size_t count) { return count == each.front(); });
  if (even) return {each.front(), {}};
  return {0, std::move(each)};
}

void check_part(const Tensor& part, const Tensor& whole, std::size_t count, Unit unit) {
  if (part.scalar_type() == whole.scalar_type() && unit.count(part.numel()) == count) return;
  throw UsageError(
      {.what = concat("this rank's part is ", part.numel(), " ", c10::toString(part.scalar_type()), ", but ",
                      count / unit.each, " ", c10::toString(whole.scalar_type()), " are its share of the whole"),
       .next = "give tensors that fit: the whole is the parts of all ranks"});
}

// gather and scatter know parts of one size only.
void check_equal_parts(const Tensors& whole, const Tensor& part, int size) {
  const Unit unit = unit_to_move(part);
  const Counts counts = counts_of(whole, size, unit);
  for (int rank = 0; rank < size; ++rank) check_part(part, whole.front(), counts.of(rank), unit);
}

void check_same_dtype(const Tensor& input, const Tensor& output) {
  if (input.scalar_type() == output.scalar_type()) return;
  throw UsageError({.what = concat("input of ", c10::toString(input.scalar_type()), ", output of ",
                                   c10::toString(output.scalar_type())),
                    .next = "convert them to one dtype"});
}

void check_pairs(const Tensors& outputs, const Tensors& inputs) {
  if (outputs.size() == inputs.size()) return;
  throw UsageError({.what = concat(outputs.size(), " output tensors for ", inputs.size(), " input tensors"),
                    .next = "give one output per input"});
}

std::vector<std::size_t> counts_of_tensors(const Tensors& tensors, int size) {
  if (tensors.size() != static_cast<std::size_t>(size))
    throw UsageError(
        {.what = concat(tensors.size(), " tensors for ", size, " ranks"), .next = "give one tensor per rank"});
  std::vector<std::size_t> counts;
  for (const Tensor& tensor : tensors) counts.push_back(unit_to_move(tensor).count(tensor.numel()));
  return counts;
}

std::vector<std::size_t> counts_of_rows(const Tensor& tensor, const std::vector<std::int64_t>& splits, int size,
                                        const char* what) {
  const std::int64_t rows = tensor.dim() > 0 ? tensor.size(0) : 1;
  std::vector<std::int64_t> all = splits;
  if (all.empty()) all.assign(static_cast<std::size_t>(size), rows / size);
  std::int64_t sum = 0;
  for (const std::int64_t split : all) sum += split;
  if (sum != rows || all.size() != static_cast<std::size_t>(size))
    throw UsageError({.what = concat("all_to_all can't split ", rows, " rows of ", what, " into ", all.size(),
                                     " parts of ", sum, " rows together for ", size, " ranks"),
                      .next = "give split sizes, one per rank, that add up to the first dimension"});
  const std::size_t row = rows > 0 ? unit_to_move(tensor).count(tensor.numel() / rows) : 0;
  std::vector<std::size_t> counts;
  for (const std::int64_t split : all) counts.push_back(static_cast<std::size_t>(split) * row);
  return counts;
}

// ---- Work

std::exception_ptr failure_of(const std::function<void()>& body) {
  try {
    body();
  } catch (...) {
    return std::current_exception();
  }
  return nullptr;
}

class CollectiveWork final : public c10d::Work {
 public:
  CollectiveWork(int rank, OpType type, Tensors results)
      : c10d::Work(rank, type),
        results_(std::move(results)),
        future_(c10::make_intrusive<c10::ivalue::Future>(c10::ListType::ofTensors())) {}

  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }
  std::vector<Tensor> result() override { return results_; }

  // The future first, as Gloo: who has waited finds it done.
  void complete(const std::exception_ptr& error) {
    if (error)
      future_->setError(error);
    else
      future_->markCompleted(c10::IValue(results_));
    finish(error);
  }

 private:
  Tensors results_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

// A send or receive. Its tensor is complete once wait(), or isCompleted(), has said so.
class MessageWork final : public c10d::Work {
 public:
  MessageWork(int rank, OpType type, Piece piece, shm::Work work)
      : c10d::Work(rank, type), piece_(std::move(piece)), work_(std::move(work)) {}

  bool isCompleted() override {
    if (work_.done()) settle();
    return c10d::Work::isCompleted();
  }
  bool isSuccess() const override { return work_.done() && c10d::Work::isSuccess(); }
  int sourceRank() const override { return work_.source(); }
  std::vector<Tensor> result() override { return {piece_.first()}; }

  bool wait(std::chrono::milliseconds timeout) override {
    if (timeout == kNoTimeout)
      work_.wait();
    else
      work_.wait(Deadline::after(timeout));
    settle();
    return c10d::Work::wait(kNoTimeout);
  }

 private:
  void settle() {
    std::call_once(settled_, [this] {
      finish(failure_of([this] {
        work_.wait();
        if (opType_ != OpType::SEND) piece_.copy_out();
      }));
    });
  }

  Piece piece_;
  shm::Work work_;
  std::once_flag settled_;
};

// ---- Collectives one after the other

// Tasks in the order in which they are given, on a thread of its own or on that of a caller who waits anyway.
class Queue {
 public:
  using Task = std::function<void()>;  // throws nothing

  ~Queue() {
    drain();
    {
      const std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    changed_.notify_all();
    if (thread_.joinable()) thread_.join();
  }

  void run_later(Task task) {
    {
      const std::lock_guard lock(mutex_);
      tasks_.push_back(std::move(task));
      if (!thread_.joinable()) thread_ = std::thread([this] { work(); });
    }
    changed_.notify_all();
  }

  // After everything that was given before; returns once it is done.
  void run_now(const Task& task) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return tasks_.empty() && !busy_; });
    run_unlocked(task, lock);
  }

  void drain() {
    run_now([] {});
  }

 private:
  void work() {
    std::unique_lock lock(mutex_);
    while (true) {
      changed_.wait(lock, [this] { return stopping_ || (!tasks_.empty() && !busy_); });
      if (stopping_) return;
      Task task = std::move(tasks_.front());
      tasks_.pop_front();
      run_unlocked(task, lock);
    }
  }

  void run_unlocked(const Task& task, std::unique_lock<std::mutex>& lock) {
    busy_ = true;
    lock.unlock();
    task();
    lock.lock();
    busy_ = false;
    changed_.notify_all();
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Task> tasks_;
  bool busy_ = false;
  bool stopping_ = false;
  std::thread thread_;
};

// ---- How the ranks meet

// The text of every rank, through the store.
std::vector<std::string> exchange(c10d::Store& store, const std::string& topic, const std::string& mine, int rank,
                                  int size, std::chrono::milliseconds timeout) {
  std::vector<std::string> keys;
  for (int i = 0; i < size; ++i) keys.push_back(concat("lockstep/", topic, "/", i));
  store.set(keys[static_cast<std::size_t>(rank)], mine);
  try {
    store.wait(keys, timeout);
  } catch (const std::exception& error) {
    throw RendezvousError({.what = concat("not all ranks have come: ", split(error.what(), '\n').front()),
                           .here = concat("rank ", rank, " of ", size),
                           .likely = "a rank that died, or does not make this process group",
                           .next = "look at the other ranks' output"});
  }
  std::vector<std::string> texts;
  for (const std::string& key : keys) texts.push_back(store.get_to_str(key));
  return texts;
}

void require_one_machine(const std::vector<std::string>& machines, int rank) {
  const std::string& mine = machines[static_cast<std::size_t>(rank)];
  for (std::size_t other = 0; other < machines.size(); ++other)
    if (machines[other] != mine)
      throw RendezvousError({.what = concat("ranks ", rank, " and ", other, " run on different machines"),
                             .here = concat("rank ", rank, " of ", machines.size()),
                             .likely = "a job over several machines: the lockstep backend shares memory within one",
                             .next = "use \"gloo\" for this process group"});
}

shm::Group connect(c10d::Store& store, int rank, int size, std::chrono::milliseconds timeout) {
  const std::string machine = read_file("/proc/sys/kernel/random/boot_id");
  require_one_machine(exchange(store, "machine", machine, rank, size, timeout), rank);
  const Deadline deadline = Deadline::after(timeout);
  const shm::Options options{.timeout = timeout};
  if (rank > 0) return shm::join_host(store.get_to_str("lockstep/address"), rank, size, deadline, options);
  shm::Host host(size, options);
  store.set("lockstep/address", host.address());
  return host.connect(deadline);
}

}  // namespace

struct ShmBackend::Step {
  Piece input;
  Piece output;
  shm::Call call;
};

// Members go in reverse order: first the queue, which uses the group.
struct ShmBackend::Parts {
  explicit Parts(shm::Group connected) : group(std::move(connected)) {}

  void run(const std::vector<Step>& steps) {
    for (const Step& step : steps) {
      step.input.copy_in();
      group.run(step.call);
      step.output.copy_out();
    }
  }

  shm::Group group;
  std::mutex messages;  // one thread at a time starts a send or receive; a collective may be under way meanwhile
  Queue queue;
};

ShmBackend::ShmBackend(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                       std::chrono::milliseconds timeout)
    : Backend(rank, size), timeout_(timeout), parts_(std::make_unique<Parts>(connect(*store, rank, size, timeout))) {}

ShmBackend::~ShmBackend() {
  if (std::uncaught_exceptions() > 0) abort();
  try {
    shutdown();
  } catch (const std::exception&) {  // the peers notice, and no one is left here to be told
  }
}

c10::intrusive_ptr<c10d::Backend::Options> ShmBackend::getBackendOptions() {
  return c10::make_intrusive<Options>(getBackendName(), timeout_);
}

void ShmBackend::setTimeout(std::chrono::milliseconds timeout) {
  parts().queue.run_now([&] { parts().group.set_timeout(timeout); });
  timeout_ = timeout;
}

void ShmBackend::shutdown() {
  if (parts_ == nullptr) return;
  parts_->queue.drain();
  parts_->group.leave();
  parts_.reset();
}

void ShmBackend::abort() {
  if (parts_ != nullptr) parts_->group.poison("abort() was called, or an exception left the process group");
}

ShmBackend::Parts& ShmBackend::parts() const {
  if (parts_ != nullptr) return *parts_;
  throw UsageError({.what = "a call on a lockstep backend after its shutdown",
                    .likely = "destroy_process_group() came first",
                    .next = "make the call before, or a new process group"});
}

Tensor ShmBackend::allocateTensor(long size, at::TensorOptions options) {
  const auto bytes = static_cast<std::size_t>(size) * options.dtype().itemsize();
  auto memory = std::make_shared<shm::Memory>(parts().group.allocate(bytes));
  return at::from_blob(
      memory->data(), {size}, [memory](void*) mutable { memory.reset(); }, options);
}

WorkPtr ShmBackend::start(OpType type, std::vector<Step> steps, Tensors results, bool async) {
  ++issued_;
  auto work = c10::make_intrusive<CollectiveWork>(rank_, type, std::move(results));
  auto task = [parts = &parts(), work, steps = std::move(steps)]() mutable {
    const std::exception_ptr error = failure_of([&] { parts->run(steps); });
    steps.clear();  // who has waited is the only one to hold the tensors
    work->complete(error);
  };
  if (async)
    parts().queue.run_later(std::move(task));
  else
    parts().queue.run_now(std::move(task));
  return work;
}

// ---- Reductions

ShmBackend::Step ShmBackend::all_reduce_step(const Tensor& tensor, const c10d::ReduceOp& op) const {
  const Piece output({tensor});
  const Piece input = op.op_ == c10d::ReduceOp::PREMUL_SUM ? Piece({scaled(tensor, op)}) : output;
  const Unit unit = unit_to_reduce(tensor, op);
  return {input, output,
          shm::AllReduce{.input = input.memory(),
                         .output = output.memory(),
                         .count = unit.count(tensor.numel()),
                         .dtype = unit.dtype,
                         .op = to_shm(op)}};
}

WorkPtr ShmBackend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  const Tensor& tensor = only_one(tensors, "all_reduce");
  return start(OpType::ALLREDUCE, {all_reduce_step(tensor, options.reduceOp)}, tensors, options.asyncOp);
}

WorkPtr ShmBackend::allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) {
  std::vector<Step> steps;
  for (const Tensor& tensor : tensors) steps.push_back(all_reduce_step(tensor, options.reduceOp));
  return start(OpType::ALLREDUCE_COALESCED, std::move(steps), tensors, options.asyncOp);
}

WorkPtr ShmBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  const Tensor& tensor = only_one(tensors, "reduce");
  const Piece input({scaled(tensor, options.reduceOp)});
  const Piece output = options.rootRank == rank_ ? Piece({tensor}) : Piece();
  const Unit unit = unit_to_reduce(tensor, options.reduceOp);
  const shm::Reduce call{.input = input.memory(),
                         .output = output.memory(),
                         .count = unit.count(tensor.numel()),
                         .dtype = unit.dtype,
                         .op = to_shm(options.reduceOp),
                         .root = static_cast<int>(options.rootRank)};
  return start(OpType::REDUCE, {{input, output, call}}, tensors, options.asyncOp);
}

ShmBackend::Step ShmBackend::reduce_scatter_step(const Tensor& part, const Tensors& whole,
                                                 const c10d::ReduceOp& op) const {
  const Piece output({part});
  const Piece input = input_beside(scaled(whole, op), output);
  const Unit unit = unit_to_reduce(part, op);
  Counts counts = counts_of(whole, size_, unit);
  check_part(part, input.first(), counts.of(rank_), unit);
  return {input, output,
          shm::ReduceScatter{.input = input.memory(),
                             .output = output.memory(),
                             .count = counts.even,
                             .counts = std::move(counts.each),
                             .dtype = unit.dtype,
                             .op = to_shm(op)}};
}

WorkPtr ShmBackend::reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                   const c10d::ReduceScatterOptions& options) {
  const Step step = reduce_scatter_step(only_one(outputs, "output"), only_one(inputs, "input"), options.reduceOp);
  return start(OpType::REDUCE_SCATTER, {step}, outputs, options.asyncOp);
}

WorkPtr ShmBackend::_reduce_scatter_base(Tensor& output, Tensor& input, const c10d::ReduceScatterOptions& options) {
  const Step step = reduce_scatter_step(output, {input}, options.reduceOp);
  return start(OpType::_REDUCE_SCATTER_BASE, {step}, {output}, options.asyncOp);
}

WorkPtr ShmBackend::reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                    const c10d::ReduceScatterOptions& options) {
  check_pairs(outputs, inputs);
  std::vector<Step> steps;
  for (std::size_t i = 0; i < outputs.size(); ++i)
    steps.push_back(reduce_scatter_step(outputs[i], {inputs[i]}, options.reduceOp));
  return start(OpType::COALESCED, std::move(steps), outputs, options.asyncOp);
}

// ---- Moving data

WorkPtr ShmBackend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  const Tensor& tensor = only_one(tensors, "broadcast");
  const Piece piece({tensor});
  const Unit unit = unit_to_move(tensor);
  const shm::Broadcast call{.data = piece.memory(),
                            .count = unit.count(tensor.numel()),
                            .dtype = unit.dtype,
                            .root = static_cast<int>(options.rootRank)};
  return start(OpType::BROADCAST, {{piece, piece, call}}, tensors, options.asyncOp);
}

WorkPtr ShmBackend::barrier(const c10d::BarrierOptions& options) {
  return start(OpType::BARRIER, {{Piece(), Piece(), shm::Barrier{}}}, {}, options.asyncOp);
}

ShmBackend::Step ShmBackend::all_gather_step(const Tensors& whole, const Tensor& part) const {
  const Piece output(whole);
  const Piece input = input_beside({part}, output);
  const Unit unit = unit_to_move(part);
  Counts counts = counts_of(whole, size_, unit);
  check_part(part, whole.front(), counts.of(rank_), unit);
  return {input, output,
          shm::AllGather{.input = input.memory(),
                         .output = output.memory(),
                         .count = counts.even,
                         .counts = std::move(counts.each),
                         .dtype = unit.dtype}};
}

WorkPtr ShmBackend::allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) {
  const Tensors& whole = only_one(outputs, "output");
  return start(OpType::ALLGATHER, {all_gather_step(whole, only_one(inputs, "input"))}, whole, options.asyncOp);
}

WorkPtr ShmBackend::_allgather_base(Tensor& output, Tensor& input, const c10d::AllgatherOptions& options) {
  return start(OpType::_ALLGATHER_BASE, {all_gather_step({output}, input)}, {output}, options.asyncOp);
}

// outputs[r][i] is rank r's inputs[i].
WorkPtr ShmBackend::allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                                        const c10d::AllgatherOptions& options) {
  for (const Tensors& of_rank : outputs) check_pairs(of_rank, inputs);
  std::vector<Step> steps;
  Tensors results;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    Tensors whole;
    for (const Tensors& of_rank : outputs) whole.push_back(of_rank[i]);
    steps.push_back(all_gather_step(whole, inputs[i]));
    results.insert(results.end(), whole.begin(), whole.end());
  }
  return start(OpType::ALLGATHER_COALESCED, std::move(steps), std::move(results), options.asyncOp);
}

WorkPtr ShmBackend::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                    const c10d::AllgatherOptions& options) {
  check_pairs(outputs, inputs);
  std::vector<Step> steps;
  for (std::size_t i = 0; i < outputs.size(); ++i) steps.push_back(all_gather_step({outputs[i]}, inputs[i]));
  return start(OpType::COALESCED, std::move(steps), outputs, options.asyncOp);
}

WorkPtr ShmBackend::gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) {
  const Tensor& part = only_one(inputs, "input");
  const bool is_root = options.rootRank == rank_;
  const Tensors whole = is_root ? only_one(outputs, "output") : Tensors();
  const Piece output(whole);
  const Piece input = input_beside({part}, output);
  const Unit unit = unit_to_move(part);
  if (is_root) check_equal_parts(whole, part, size_);
  const shm::Gather call{.input = input.memory(),
                         .output = output.memory(),
                         .count = unit.count(part.numel()),
                         .dtype = unit.dtype,
                         .root = static_cast<int>(options.rootRank)};
  return start(OpType::GATHER, {{input, output, call}}, whole, options.asyncOp);
}

WorkPtr ShmBackend::scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) {
  const Tensor& part = only_one(outputs, "output");
  const bool is_root = options.rootRank == rank_;
  const Tensors whole = is_root ? only_one(inputs, "input") : Tensors();
  const Piece output({part});
  const Piece input = input_beside(whole, output);
  const Unit unit = unit_to_move(part);
  if (is_root) check_equal_parts(whole, part, size_);
  const shm::Scatter call{.input = input.memory(),
                          .output = output.memory(),
                          .count = unit.count(part.numel()),
                          .dtype = unit.dtype,
                          .root = static_cast<int>(options.rootRank)};
  return start(OpType::SCATTER, {{input, output, call}}, outputs, options.asyncOp);
}

WorkPtr ShmBackend::alltoall_base(Tensor& output_tensor, Tensor& input_tensor, std::vector<std::int64_t>& output_splits,
                                  std::vector<std::int64_t>& input_splits, const c10d::AllToAllOptions& options) {
  const Piece output({output_tensor});
  const Piece input = input_beside({input_tensor}, output);
  check_same_dtype(input_tensor, output_tensor);
  const shm::AllToAll call{.input = input.memory(),
                           .output = output.memory(),
                           .send_counts = counts_of_rows(input_tensor, input_splits, size_, "the input"),
                           .receive_counts = counts_of_rows(output_tensor, output_splits, size_, "the output"),
                           .dtype = unit_to_move(output_tensor).dtype};
  return start(OpType::ALLTOALL_BASE, {{input, output, call}}, {output_tensor}, options.asyncOp);
}

WorkPtr ShmBackend::alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) {
  const Piece output(outputs);
  const Piece input = input_beside(inputs, output);
  const shm::AllToAll call{.input = input.memory(),
                           .output = output.memory(),
                           .send_counts = counts_of_tensors(inputs, size_),
                           .receive_counts = counts_of_tensors(outputs, size_),
                           .dtype = unit_to_move(output.first()).dtype};
  check_same_dtype(input.first(), output.first());
  return start(OpType::ALLTOALL, {{input, output, call}}, outputs, options.asyncOp);
}

// ---- Messages

WorkPtr ShmBackend::send(Tensors& tensors, int to, int tag) {
  const Tensor& tensor = only_one(tensors, "send");
  const Piece piece({tensor});
  const Unit unit = unit_to_move(tensor);
  piece.copy_in();
  const std::lock_guard lock(parts().messages);
  const shm::Send call{
      .data = piece.memory(), .count = unit.count(tensor.numel()), .dtype = unit.dtype, .to = to, .tag = tag};
  return c10::make_intrusive<MessageWork>(rank_, OpType::SEND, piece, parts().group.start(call));
}

WorkPtr ShmBackend::recv(Tensors& tensors, int from, int tag) { return receive(tensors, from, tag, OpType::RECV); }

WorkPtr ShmBackend::recvAnysource(Tensors& tensors, int tag) {
  return receive(tensors, shm::kAnyRank, tag, OpType::RECVANYSOURCE);
}

WorkPtr ShmBackend::receive(Tensors& tensors, int from, int tag, OpType type) {
  const Tensor& tensor = only_one(tensors, "receive");
  const Piece piece({tensor});
  const Unit unit = unit_to_move(tensor);
  const std::lock_guard lock(parts().messages);
  const shm::Receive call{
      .data = piece.memory(), .count = unit.count(tensor.numel()), .dtype = unit.dtype, .from = from, .tag = tag};
  return c10::make_intrusive<MessageWork>(rank_, type, piece, parts().group.start(call));
}

}  // namespace lockstep
