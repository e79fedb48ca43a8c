// SPDX-License-Identifier: Apache-2.0
#include "lockstep/collective/c10d/c10d_transport.h"

#include <cstdlib>

#ifdef LOCKSTEP_WITH_CUDA
#include <c10/cuda/CUDAFunctions.h>
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>
#endif

#include "lockstep/base/text.h"
#include "lockstep/collective/c10d/c10d_call.h"
#include "lockstep/error.h"

namespace lockstep {

#ifdef LOCKSTEP_WITH_CUDA

namespace {

using Nccl = c10::intrusive_ptr<c10d::ProcessGroupNCCL>;
using Splits = std::vector<std::int64_t>;

c10d::ReduceOp to_c10d(ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum: return c10d::ReduceOp::SUM;
    case ReduceOp::kMean: return c10d::ReduceOp::AVG;
    case ReduceOp::kProduct: return c10d::ReduceOp::PRODUCT;
    case ReduceOp::kMin: return c10d::ReduceOp::MIN;
    case ReduceOp::kMax: return c10d::ReduceOp::MAX;
    case ReduceOp::kBitAnd: return c10d::ReduceOp::BAND;
    case ReduceOp::kBitOr: return c10d::ReduceOp::BOR;
    case ReduceOp::kBitXor: return c10d::ReduceOp::BXOR;
  }
  return c10d::ReduceOp::SUM;
}

Nccl connect_nccl(const c10::intrusive_ptr<c10d::Store>& store, const TransportOptions& options) {
  auto nccl = c10d::ProcessGroupNCCL::Options::create();
  nccl->timeout = options.timeout;
  return c10::make_intrusive<c10d::ProcessGroupNCCL>(with_prefix(store, "nccl"), options.rank, options.size, nccl);
}

torch::Tensor flat(const torch::Tensor& tensor) { return tensor.detach().view(-1); }

class NcclTransport : public Transport {
 public:
  NcclTransport(c10::intrusive_ptr<c10d::Store> store, TransportOptions options)
      : store_(std::move(store)), options_(std::move(options)), nccl_(connect_nccl(store_, options_)) {}

  FuturePtr start(TensorCall call) override {
    return start_c10d({to_string(call.call.operation), options_.describe}, [&] { return issue(call); });
  }

  std::unique_ptr<Transport> group(const RankLists& lists) override {
    const std::vector<int>& ranks = lists[static_cast<unsigned>(options_.rank)];
    const int made = groups_made_++;
    if (ranks.empty()) return nullptr;
    return std::make_unique<NcclTransport>(with_prefix(store_, prefix_of_group(made, ranks)),
                                           options_of_group(options_, ranks));
  }

  std::unique_ptr<Transport> separate(const RankLists& lists, std::chrono::milliseconds) override {
    return group(lists);
  }

  void fail(const std::string&) override {}  // the closed connection tells the others

 private:
  C10dWork issue(const TensorCall& call) const {
    switch (call.call.operation) {
      case Operation::kAllReduce: return all_reduce(call);
      case Operation::kReduce: return reduce(call);
      case Operation::kReduceScatter: return reduce_scatter(call);
      case Operation::kAllGather: return all_gather(call);
      case Operation::kBroadcast: return broadcast(call);
      case Operation::kGather: return gather(call);
      case Operation::kScatter: return scatter(call);
      case Operation::kAllToAll: return all_to_all(call);
      case Operation::kSend: return send(call);
      case Operation::kReceive: return receive(call);
      default: return nccl_->barrier();
    }
  }

  C10dWork all_reduce(const TensorCall& call) const {
    Tensors tensors{flat(call.output)};
    c10d::AllreduceOptions options;
    options.reduceOp = to_c10d(call.call.op);
    return nccl_->allreduce(tensors, options);
  }

  C10dWork reduce(const TensorCall& call) const {
    Tensors tensors{flat(call.input)};
    c10d::ReduceOptions options;
    options.rootRank = call.call.root;
    options.reduceOp = to_c10d(call.call.op);
    return nccl_->reduce(tensors, options);
  }

  C10dWork reduce_scatter(const TensorCall& call) const {
    Tensors outputs{flat(call.output)};
    std::vector<Tensors> inputs{parts_of(call.input, call.call.counts)};
    c10d::ReduceScatterOptions options;
    options.reduceOp = to_c10d(call.call.op);
    return nccl_->reduce_scatter(outputs, inputs, options);
  }

  C10dWork all_gather(const TensorCall& call) const {
    std::vector<Tensors> outputs{parts_of(call.output, call.call.counts)};
    Tensors inputs{flat(call.input)};
    return nccl_->allgather(outputs, inputs);
  }

  C10dWork broadcast(const TensorCall& call) const {
    Tensors tensors{flat(call.output)};
    c10d::BroadcastOptions options;
    options.rootRank = call.call.root;
    return nccl_->broadcast(tensors, options);
  }

  C10dWork gather(const TensorCall& call) const {
    std::vector<Tensors> outputs;
    if (call.output.defined()) outputs.push_back(parts_of(call.output, {}));
    Tensors inputs{flat(call.input)};
    c10d::GatherOptions options;
    options.rootRank = call.call.root;
    return nccl_->gather(outputs, inputs, options);
  }

  C10dWork scatter(const TensorCall& call) const {
    std::vector<Tensors> inputs;
    if (call.input.defined()) inputs.push_back(parts_of(call.input, {}));
    Tensors outputs{flat(call.output)};
    c10d::ScatterOptions options;
    options.rootRank = call.call.root;
    return nccl_->scatter(outputs, inputs, options);
  }

  C10dWork all_to_all(const TensorCall& call) const {
    torch::Tensor output = flat(call.output);
    torch::Tensor input = flat(call.input);
    Splits receive = splits(call.call.receive_counts);
    Splits send = splits(call.call.counts);
    return nccl_->alltoall_base(output, input, receive, send);
  }

  C10dWork send(const TensorCall& call) const {
    Tensors tensors{flat(call.input)};
    return nccl_->send(tensors, call.call.peer, static_cast<int>(call.call.tag));
  }

  C10dWork receive(const TensorCall& call) const {
    Tensors tensors{flat(call.output)};
    return nccl_->recv(tensors, call.call.peer, static_cast<int>(call.call.tag));
  }

  static Splits splits(const std::vector<std::size_t>& counts) { return {counts.begin(), counts.end()}; }

  Tensors parts_of(const torch::Tensor& whole, const std::vector<std::size_t>& counts) const {
    const Splits even(static_cast<unsigned>(options_.size), whole.numel() / options_.size);
    return flat(whole).split_with_sizes(counts.empty() ? even : splits(counts));
  }

  c10::intrusive_ptr<c10d::Store> store_;
  TransportOptions options_;
  Nccl nccl_;
  int groups_made_ = 0;
};

}  // namespace

std::unique_ptr<Transport> make_nccl(const c10::intrusive_ptr<c10d::Store>& store, const TransportOptions& options) {
  return std::make_unique<NcclTransport>(store, options);
}

int cuda_device_count() { return c10::cuda::device_count(); }

int cuda_device_index(int local_rank) {
  const int devices = c10::cuda::device_count();
  const char* visible = std::getenv("CUDA_VISIBLE_DEVICES");
  if (local_rank < devices) return local_rank;
  throw DeviceError({.what = concat("local rank ", local_rank, " has no GPU: ", devices, " visible"),
                     .here = concat("CUDA_VISIBLE_DEVICES=", visible != nullptr ? visible : "(not set)"),
                     .likely = "more ranks on this machine than GPUs, or none is visible",
                     .next = "start fewer ranks, change CUDA_VISIBLE_DEVICES, or use --device cpu"});
}

#else

std::unique_ptr<Transport> make_nccl(const c10::intrusive_ptr<c10d::Store>&, const TransportOptions&) {
  cuda_device_index(0);
  return {};
}

int cuda_device_count() { return 0; }

int cuda_device_index(int) {
  throw DeviceError({.what = "this lockstep was built without CUDA",
                     .likely = "--device cuda with the release preset",
                     .next = "build the cuda preset (`make cuda`), or use --device cpu"});
}

#endif

}  // namespace lockstep
