// SPDX-License-Identifier: Apache-2.0
#include <torch/csrc/distributed/c10d/Backend.hpp>
#ifdef LOCKSTEP_WITH_CUDA
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>
#else
#include <dlfcn.h>
#endif

#include "lockstep/base/to_size.h"
#include "lockstep/collective/c10d/c10d_call.h"
#include "lockstep/collective/gpus.h"

namespace lockstep {

namespace {

using Nccl = c10::intrusive_ptr<c10d::Backend>;
using Splits = std::vector<int64_t>;

// c10d's options for a call: its reduction and root, where they have those. Reductions are in c10d's order
// (backend_calls.cc).
template <class Options>
Options options_of(const Call& call) {
  Options options;
  if constexpr (requires { options.reduceOp; }) options.reduceOp = static_cast<c10d::ReduceOp::RedOpType>(call.op);
  if constexpr (requires { options.rootRank; }) options.rootRank = call.root;
  return options;
}

#ifdef LOCKSTEP_WITH_CUDA

Nccl connect_nccl(const StorePtr& store, const TransportOptions& options) {
  auto nccl = c10d::ProcessGroupNCCL::Options::create();
  nccl->timeout = options.timeout;
  return c10::make_intrusive<c10d::ProcessGroupNCCL>(with_prefix(store, "nccl"), options.rank, options.size, nccl);
}

#else

// A library that brings GPUs of its own, as the tests' simulator does, brings a backend between them, too.
Nccl connect_nccl(const StorePtr& store, const TransportOptions& options) {
  using Make = c10d::Backend*(const StorePtr&, int rank, int size, milliseconds);
  const auto make = reinterpret_cast<Make*>(::dlsym(RTLD_DEFAULT, "lockstep_simulated_nccl"));
  if (make == nullptr) throw built_without_cuda();
  require_gpus(0);
  return Nccl::reclaim(make(with_prefix(store, "nccl"), options.rank, options.size, options.timeout));
}

#endif

class NcclTransport : public Transport {
 public:
  NcclTransport(StorePtr store, TransportOptions options)
      : store_(std::move(store)), options_(std::move(options)), nccl_(connect_nccl(store_, options_)) {}

  FuturePtr start(TensorCall call) override {
    check_call(call, options_.size);
    return start_c10d({to_string(call.operation), options_.describe}, [&] { return issue(call); });
  }

  std::unique_ptr<Transport> group(const std::vector<int>& ranks, std::optional<milliseconds>) override {
    const int made = groups_made_++;
    if (ranks.empty()) return nullptr;
    return std::make_unique<NcclTransport>(with_prefix(store_, prefix_of_group(made, ranks)),
                                           options_of_group(options_, ranks));
  }

 private:
  C10dWork issue(const TensorCall& made) const {
    const Call& call = made;
    Tensors input = list_of(made.input_tensor);
    Tensors output = list_of(made.output_tensor);
    Splits send = splits(call.counts);
    Splits receive = splits(call.receive_counts);
    switch (call.operation) {
      case Operation::kAllReduce: return nccl_->allreduce(output, options_of<c10d::AllreduceOptions>(call));
      case Operation::kReduce: return nccl_->reduce(input, options_of<c10d::ReduceOptions>(call));
      case Operation::kBroadcast: return nccl_->broadcast(output, options_of<c10d::BroadcastOptions>(call));
      case Operation::kAllToAll: return nccl_->alltoall_base(output.front(), input.front(), receive, send);
      case Operation::kSend: return nccl_->send(input, call.peer, to_int(call.tag));
      case Operation::kReceive: return nccl_->recv(output, call.peer, to_int(call.tag));
      case Operation::kReduceScatter:
        if (send.empty())  // parts of equal length: NCCL works on the whole; it would copy a list of parts to one
          return nccl_->_reduce_scatter_base(output.front(), input.front(),
                                             options_of<c10d::ReduceScatterOptions>(call));
        [[fallthrough]];
      case Operation::kScatter: return issue_to_parts(call, output, parts_of(input, send));
      case Operation::kAllGather:
        if (send.empty()) return nccl_->_allgather_base(output.front(), input.front());
        [[fallthrough]];
      case Operation::kGather: return issue_from_parts(call, parts_of(output, send), input);
      default: return nccl_->barrier();
    }
  }

  C10dWork issue_to_parts(const Call& call, Tensors& output, std::vector<Tensors> inputs) const {
    if (call.operation == Operation::kScatter)
      return nccl_->scatter(output, inputs, options_of<c10d::ScatterOptions>(call));
    return nccl_->reduce_scatter(output, inputs, options_of<c10d::ReduceScatterOptions>(call));
  }

  C10dWork issue_from_parts(const Call& call, std::vector<Tensors> outputs, Tensors& input) const {
    if (call.operation == Operation::kGather)
      return nccl_->gather(outputs, input, options_of<c10d::GatherOptions>(call));
    return nccl_->allgather(outputs, input);
  }

  static Splits splits(const std::vector<size_t>& counts) { return {counts.begin(), counts.end()}; }

  static Tensors list_of(const torch::Tensor& tensor) {
    return tensor.defined() ? Tensors{tensor.detach().view(-1)} : Tensors();
  }

  // The parts of all ranks of a whole; empty where this rank has none. `counts`: of each part; empty: equal parts.
  std::vector<Tensors> parts_of(const Tensors& whole, const Splits& counts) const {
    if (whole.empty()) return {};
    const Splits even(to_size(options_.size), whole.front().numel() / options_.size);
    return {whole.front().split_with_sizes(counts.empty() ? even : counts)};
  }

  StorePtr store_;
  TransportOptions options_;
  Nccl nccl_;
  int groups_made_ = 0;
};

}  // namespace

std::unique_ptr<Transport> make_nccl(const StorePtr& store, const TransportOptions& options) {
  return std::make_unique<NcclTransport>(store, options);
}

}  // namespace lockstep
