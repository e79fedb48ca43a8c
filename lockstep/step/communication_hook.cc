// SPDX-License-Identifier: Apache-2.0
#include "lockstep/communication_hook.h"

#include <ATen/CPUGeneratorImpl.h>

#include <algorithm>
#include <cmath>
#include <map>

#include "lockstep/base/text.h"
#include "lockstep/error.h"
#include "lockstep/step/two_bit.h"

namespace lockstep {
namespace {

class SixteenBitHook : public CommunicationHook {
 public:
  explicit SixteenBitHook(torch::ScalarType dtype) : dtype_(dtype) {}

  Finish start(const World& world, const GradientBucket& bucket) override {
    const torch::Tensor narrow =
        world.allocate(bucket.flat.sizes(), bucket.flat.options().dtype(dtype_)).copy_(bucket.flat);
    return [work = world.all_reduce_async(narrow), narrow, flat = bucket.flat]() mutable {
      work.wait();
      flat.copy_(narrow);
    };
  }

 private:
  torch::ScalarType dtype_;
};

// A hook with error feedback: what was not sent yet of each bucket is added to the next gradient before that is
// compressed. It is rescaled when the unit of the bucket changes, so that what is sent late counts as much as if it had
// been sent at once.
class ResidualHook : public CommunicationHook {
 public:
  bool keeps_residual() const override { return true; }

  NamedTensors state() const override {
    NamedTensors state;
    for (const auto& [name, tensor] : kept_) state.push_back({name, tensor});
    return state;
  }

  void set_state(const NamedTensors& state) override {
    for (const auto& [name, tensor] : state) kept_[name] = tensor.clone();
  }

 protected:
  // A tensor that a bucket keeps from step to step; undefined at first.
  torch::Tensor& kept(const std::string& name, size_t bucket) { return kept_[concat(name, ".", bucket)]; }

  // The bucket's gradient plus what was not sent before. The caller subtracts what it sends.
  const torch::Tensor& add_residual(const GradientBucket& bucket) {
    torch::Tensor &residual = kept("residual", bucket.number), &unit = kept("unit", bucket.number);
    if (!residual.defined()) residual = torch::zeros_like(bucket.flat);
    if (!unit.defined()) unit = torch::ones({}, torch::kFloat64);
    const double before = unit.item<double>();
    if (before != bucket.unit) residual.mul_(before / bucket.unit);
    unit.fill_(bucket.unit);
    return residual.add_(bucket.flat);
  }

 private:
  std::map<std::string, torch::Tensor> kept_;
};

class TwoBitHook : public ResidualHook {
 public:
  explicit TwoBitHook(double threshold) : threshold_(threshold) {}

  Finish start(const World& world, const GradientBucket& bucket) override {
    Work work = world.all_gather_async(take_two_bits(add_residual(bucket), threshold_));
    return [work, flat = bucket.flat, threshold = threshold_]() mutable {
      work.wait();
      const torch::Tensor& all = work.result();  // (N, words). Summed in rank order, so every rank gets the same bits.
      flat.zero_();
      for (int64_t rank = 0; rank < all.size(0); ++rank)
        flat.add_(from_two_bits(all[rank], flat.numel(), threshold, flat.options()));
    };
  }

 private:
  double threshold_;
};

class TopKHook : public ResidualHook {
 public:
  explicit TopKHook(double share) : share_(share) {}

  Finish start(const World& world, const GradientBucket& bucket) override {
    torch::Tensor left = add_residual(bucket);
    const auto wanted = static_cast<int64_t>(std::ceil(share_ * static_cast<double>(left.numel())));
    const torch::Tensor index = std::get<1>(left.abs().topk(std::max<int64_t>(wanted, 1), 0, true, /*sorted=*/false));
    const torch::Tensor largest = left.index_select(0, index);
    left.index_fill_(0, index, 0);
    Work indices = world.all_gather_async(left.numel() <= INT32_MAX ? index.to(torch::kInt32) : index);
    Work values = world.all_gather_async(largest);
    return [indices, values, flat = bucket.flat]() mutable {
      indices.wait();
      values.wait();
      flat.zero_();
      for (int64_t rank = 0; rank < values.result().size(0); ++rank)
        flat.index_add_(0, indices.result()[rank].to(torch::kInt64), values.result()[rank]);
    };
  }

 private:
  double share_;
};

// The sum over ranks, in as many bytes as they have.
void sum_exactly(const World& world, const Tensors& parts) {
  if (parts.empty()) return;
  const torch::Tensor all = at::flatten_dense_tensors(parts);
  world.all_reduce(all);
  at::_foreach_copy_(parts, at::unflatten_dense_tensors(all, parts));
}

class PowerSGDHook : public ResidualHook {
 public:
  explicit PowerSGDHook(const PowerSGDOptions& options) : options_(options) {}

  // Adds what was not sent before to each matrix; compresses and sums in the returned function.
  Finish start(const World& world, const GradientBucket& bucket) override {
    const auto left = at::unflatten_dense_tensors(add_residual(bucket), bucket.parts);
    Tensors sums, matrices, others;
    for (size_t i = 0; i < left.size(); ++i) {
      if (is_compressed(left[i])) {
        sums.push_back(bucket.parts[i]);
        matrices.push_back(left[i].flatten(1));  // the first dimension against the others
      } else {
        others.push_back(bucket.parts[i]);
        left[i].zero_();
      }
    }
    std::vector<torch::Tensor*> bases;
    for (size_t i = 0; i < matrices.size(); ++i) bases.push_back(&kept(concat("basis.", bucket.number), i));
    if (!bases.empty() && !bases.front()->defined()) set_random(bases, matrices, options_.seed + bucket.number);
    return [world, sums, matrices, others, bases] {
      sum_exactly(world, others);
      sum_as_products(world, matrices, bases, sums);
    };
  }

 private:
  bool is_compressed(const torch::Tensor& part) const {
    if (part.dim() < 2 || part.numel() == 0) return false;
    const int64_t n = part.size(0);
    const int64_t m = part.numel() / n;
    return (n + m) * rank_of(part) < n * m;
  }

  int64_t rank_of(const torch::Tensor& part) const {
    return std::min({options_.rank, part.size(0), part.numel() / part.size(0)});
  }

  // For the first step: the same on every rank.
  void set_random(const std::vector<torch::Tensor*>& bases, const Tensors& matrices, uint64_t seed) const {
    const auto generator = at::make_generator<at::CPUGeneratorImpl>(seed);
    for (size_t i = 0; i < matrices.size(); ++i)
      *bases[i] = torch::randn({matrices[i].size(1), rank_of(matrices[i])}, generator).to(matrices[i].options());
  }

  // Algorithm 1 of the paper, for all matrices of a bucket at once. For a matrix M_j (n x m) on rank j, with the basis
  // Q (m x r) of the last step, the same on every rank:
  //   1. P = sum_j M_j Q, all-reduced: 4 n r bytes;  P is made orthonormal (QR)
  //   2. Q = sum_j M_j^T P, all-reduced: 4 m r bytes: the basis of the next step
  //   3. the sum over ranks is P Q^T; each rank keeps M_j - P Q^T / N, which it has not sent
  // P and Q come out of all-reduces and the same arithmetic, so all ranks have the same bits.
  static void sum_as_products(const World& world, const Tensors& matrices, const std::vector<torch::Tensor*>& bases,
                              const Tensors& sums) {
    Tensors left_factors, right_factors;
    for (size_t i = 0; i < matrices.size(); ++i) left_factors.push_back(matrices[i].matmul(*bases[i]));
    sum_exactly(world, left_factors);
    for (size_t i = 0; i < matrices.size(); ++i) {
      left_factors[i] = std::get<0>(torch::linalg_qr(left_factors[i]));
      right_factors.push_back(*bases[i] = matrices[i].t().matmul(left_factors[i]));
    }
    sum_exactly(world, right_factors);
    for (size_t i = 0; i < matrices.size(); ++i) {
      const torch::Tensor sum = left_factors[i].matmul(right_factors[i].t());
      sums[i].copy_(sum.view(sums[i].sizes()));
      matrices[i].sub_(sum, 1.0 / world.size());
    }
  }

  PowerSGDOptions options_;
};

}  // namespace

std::shared_ptr<CommunicationHook> sixteen_bit_hook(torch::ScalarType dtype) {
  if (dtype != torch::kFloat16 && dtype != torch::kBFloat16)
    throw UsageError({.what = concat("gradients in ", c10::toString(dtype)), .next = "float16 or bfloat16"});
  return std::make_shared<SixteenBitHook>(dtype);
}

std::shared_ptr<CommunicationHook> power_sgd_hook(const PowerSGDOptions& options) {
  if (options.rank < 1)
    throw UsageError({.what = concat("PowerSGD with rank ", options.rank), .next = "take at least 1"});
  return std::make_shared<PowerSGDHook>(options);
}

std::shared_ptr<CommunicationHook> two_bit_hook(double threshold) {
  if (!(threshold > 0))
    throw UsageError({.what = concat("2-bit compression with threshold ", threshold), .next = "take a positive one"});
  return std::make_shared<TwoBitHook>(threshold);
}

std::shared_ptr<CommunicationHook> top_k_hook(double share) {
  if (!(share > 0 && share <= 1))
    throw UsageError(
        {.what = concat("top-k compression of a share of ", share), .next = "take one in (0, 1], such as 0.01"});
  return std::make_shared<TopKHook>(share);
}

std::shared_ptr<CommunicationHook> make_hook(const CompressionOptions& options) {
  const double amount = options.amount;
  switch (options.kind) {
    case Compression::kNone: return nullptr;
    case Compression::kFloat16: return sixteen_bit_hook(torch::kFloat16);
    case Compression::kBFloat16: return sixteen_bit_hook(torch::kBFloat16);
    case Compression::kPowerSGD: return power_sgd_hook({.rank = amount == 0 ? 4 : static_cast<int64_t>(amount)});
    case Compression::kTwoBit: return two_bit_hook(amount == 0 ? 0.5 : amount);
    case Compression::kTopK: return top_k_hook(amount == 0 ? 0.01 : amount);
  }
  return nullptr;
}

}  // namespace lockstep
