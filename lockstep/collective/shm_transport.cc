#include "lockstep/collective/shm_transport.h"

#include <deque>
#include <exception>
#include <numeric>

#include "lockstep/base/error.h"
#include "lockstep/base/text.h"
#include "lockstep/collective/shm/group.h"
#include "lockstep/collective/shm/rendezvous.h"
#include "lockstep/collective/shm_dtype.h"

namespace lockstep {
namespace {

shm::DType dtype_of(const torch::Tensor& tensor) {
  if (const auto dtype = to_shm_dtype(tensor.scalar_type())) return *dtype;
  throw UsageError({.what = concat("tensors of ", c10::toString(tensor.scalar_type()), " can't be exchanged"),
                    .next = "exchange real and imaginary parts, or another dtype"});
}

shm::ReduceOp to_shm(ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum: return shm::ReduceOp::kSum;
    case ReduceOp::kMin: return shm::ReduceOp::kMin;
    case ReduceOp::kMax: return shm::ReduceOp::kMax;
  }
  return shm::ReduceOp::kSum;
}

std::size_t count_of(const torch::Tensor& tensor) { return static_cast<std::size_t>(tensor.numel()); }

// Note [Postponed calls]
// all_reduce_async only notes the call; whoever waits makes it, and those issued before it. The ranks of a machine keep its
// cores busy with backward: a thread beside them would take from their time what it gives, and its waiting for the other
// ranks on top (docs/design/exchange.md has the figures). Every rank issues in the same order, so every rank makes the calls
// in the same order, whichever Work it waits for first.
class ShmTransport : public Transport {
 public:
  explicit ShmTransport(shm::Group group) : group_(std::move(group)) {}

  // In good order, unless an exception is on its way out: then the others learn at once that this rank is gone.
  ~ShmTransport() override {
    if (std::uncaught_exceptions() > 0) return;
    try {
      group_.leave();
    } catch (const std::exception&) {
    }
  }

  Work all_reduce_async(const torch::Tensor& tensor, ReduceOp op) override {
    postponed_.push_back({tensor, shm::AllReduce{.input = tensor.const_data_ptr(),
                                                 .output = tensor.mutable_data_ptr(),
                                                 .count = count_of(tensor),
                                                 .dtype = dtype_of(tensor),
                                                 .op = to_shm(op)}});
    return Work([this, number = ++issued_] { make_calls_until(number); });
  }

  void broadcast(const torch::Tensor& tensor, int root) override {
    make_calls_until(issued_);
    group_.broadcast({.data = tensor.mutable_data_ptr(),
                      .count = count_of(tensor),
                      .dtype = dtype_of(tensor),
                      .root = root});
  }

  torch::Tensor all_gather(const torch::Tensor& tensor) override {
    make_calls_until(issued_);
    std::vector<std::int64_t> shape = tensor.sizes().vec();
    shape.insert(shape.begin(), group_.size());
    torch::Tensor gathered = torch::empty(shape, tensor.options().requires_grad(false));
    group_.all_gather({.input = tensor.const_data_ptr(),
                       .output = gathered.mutable_data_ptr(),
                       .count = count_of(tensor),
                       .dtype = dtype_of(tensor)});
    return gathered;
  }

  torch::Tensor allocate(torch::IntArrayRef sizes, const torch::TensorOptions& options) override {
    const auto bytes = static_cast<std::size_t>(c10::multiply_integers(sizes)) * options.dtype().itemsize();
    auto memory = std::make_shared<shm::Memory>(group_.allocate(bytes));
    return torch::from_blob(memory->data(), sizes, [memory](void*) mutable { memory.reset(); }, options);
  }

  std::optional<shm::Group> machine_group() override {
    make_calls_until(issued_);
    std::vector<int> everyone(static_cast<std::size_t>(group_.size()));
    std::iota(everyone.begin(), everyone.end(), 0);
    return group_.subgroup(everyone);
  }

  void fail(const std::string& reason) override { group_.poison(reason); }

 private:
  struct Postponed {
    torch::Tensor tensor;  // keeps the memory
    shm::AllReduce call;
  };

  void make_calls_until(std::int64_t number) {
    for (; made_ < number; ++made_) {
      group_.all_reduce(postponed_.front().call);
      postponed_.pop_front();
    }
  }

  shm::Group group_;
  std::deque<Postponed> postponed_;
  std::int64_t issued_ = 0;
  std::int64_t made_ = 0;
};

}  // namespace

std::unique_ptr<Transport> make_shared_memory(const World& world, const TransportOptions& options) {
  const shm::Options shm_options{.timeout = options.timeout};
  const Deadline deadline = Deadline::after(options.timeout);
  if (options.rank == 0) {
    shm::Host host(options.size, shm_options);
    static_cast<void>(world.exchange_texts("the address of shared memory", host.address()));
    return std::make_unique<ShmTransport>(host.connect(deadline));
  }
  const std::string address = world.exchange_texts("the address of shared memory", "").front();
  return std::make_unique<ShmTransport>(
      shm::join_host(address, options.rank, options.size, deadline, shm_options));
}

std::vector<std::unique_ptr<Transport>> make_shared_memory_of_threads(int ranks, std::chrono::milliseconds timeout) {
  std::vector<std::unique_ptr<Transport>> transports;
  for (shm::Group& group : shm::make_thread_group(ranks, {.timeout = timeout}))
    transports.push_back(std::make_unique<ShmTransport>(std::move(group)));
  return transports;
}

}  // namespace lockstep
