// SPDX-License-Identifier: Apache-2.0
// c10d's Gloo, as one of the systems.
#include <map>

#include <ATen/Parallel.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include "bench/collectives/cases.h"
#include "bench/collectives/systems.h"

namespace lockstep::bench {
namespace {

using Tensors = std::vector<at::Tensor>;

at::ScalarType type_of(const std::string& dtype) {
  static const std::map<std::string, at::ScalarType> types{
      {"float32", at::kFloat}, {"float64", at::kDouble}, {"float16", at::kHalf}, {"bfloat16", at::kBFloat16},
      {"int32", at::kInt},     {"int64", at::kLong},     {"uint8", at::kByte}};
  return types.at(dtype);
}

class GlooRank final : public System {
 public:
  explicit GlooRank(const GlooOptions& options) : rank_(options.rank), size_(options.size) {
    at::set_num_threads(1);
    auto how = c10d::ProcessGroupGloo::Options::create(std::chrono::minutes(2));
    how->devices.push_back(c10d::ProcessGroupGloo::createDeviceForHostname(options.address));
    gloo_ = c10::make_intrusive<c10d::ProcessGroupGloo>(c10::make_intrusive<c10d::FileStore>(options.store, size_),
                                                        rank_, size_, how);
  }
  int rank() const override { return rank_; }
  void barrier() override { gloo_->barrier()->wait(); }
  double slowest(double seconds) override {
    Tensors tensors{at::full({1}, seconds, at::kDouble)};
    gloo_->allreduce(tensors, {c10d::ReduceOp::MAX})->wait();
    return tensors[0].item<double>();
  }
  std::function<void()> prepare(const Case& one) override;

 private:
  using Call = std::function<c10::intrusive_ptr<c10d::Work>()>;
  Call call_for(const std::string& operation, at::Tensor data, at::Tensor whole, at::Tensor result) const;

  c10::intrusive_ptr<c10d::ProcessGroupGloo> gloo_;
  int rank_;
  int size_;
};

std::function<void()> GlooRank::prepare(const Case& one) {
  const auto elements = static_cast<int64_t>(one.whole(size_));
  const at::Tensor data = at::zeros({static_cast<int64_t>(one.count())}, type_of(one.dtype));
  const at::Tensor whole = at::zeros({elements}, type_of(one.dtype));
  if (one.operation == "send_receive") {
    const int peer = 1 - rank_;
    return there_and_back(
        rank_, [=, this, tensors = Tensors{data}]() mutable { gloo_->send(tensors, peer, 0)->wait(); },
        [=, this, tensors = Tensors{data}]() mutable { gloo_->recv(tensors, peer, 0)->wait(); });
  }
  const Call call = call_for(one.operation, data, whole, at::zeros_like(whole));
  if (!call) return nullptr;
  return [call] { call()->wait(); };
}

// `data` is a rank's own array, `whole` and `result` are parts of all ranks.
GlooRank::Call GlooRank::call_for(const std::string& operation, at::Tensor data, at::Tensor whole,
                                  at::Tensor result) const {
  const auto gloo = gloo_;
  at::Tensor part = result.chunk(size_).at(rank_).clone();
  Tensors one{data};
  Tensors own{part};
  std::vector<Tensors> at_root;
  if (rank_ == 0) at_root.push_back(whole.chunk(size_));
  std::vector<int64_t> even;
  const std::map<std::string, Call> calls{
      {"barrier", [=] { return gloo->barrier(); }},
      {"all_reduce", [=]() mutable { return gloo->allreduce(one); }},
      {"reduce", [=]() mutable { return gloo->reduce(one); }},
      {"reduce_scatter", [=]() mutable { return gloo->_reduce_scatter_base(part, whole); }},
      {"all_gather", [=]() mutable { return gloo->_allgather_base(whole, part); }},
      {"broadcast", [=]() mutable { return gloo->broadcast(one); }},
      {"gather", [=]() mutable { return gloo->gather(at_root, own); }},
      {"scatter", [=]() mutable { return gloo->scatter(own, at_root); }},
      {"all_to_all", [=]() mutable { return gloo->alltoall_base(result, whole, even, even); }},
  };
  const auto found = calls.find(operation);
  return found == calls.end() ? nullptr : found->second;
}

}  // namespace

std::unique_ptr<System> make_gloo_rank(const GlooOptions& options) { return std::make_unique<GlooRank>(options); }

// Gloo's ranks meet through a file beside the socket.
RunningSystemPtr start_gloo(int ranks) {
  return std::make_unique<RunningSystem>("Gloo", ranks, ranks, [=](int rank, const std::string& address) {
    return ProcessOptions{.body = [=] {
      serve(*make_gloo_rank({.store = address + ".store", .rank = rank, .size = ranks}), address);
      return 0;
    }};
  });
}

}  // namespace lockstep::bench
