// SPDX-License-Identifier: Apache-2.0
#include "tests/step_fuzz/reference_hook.h"

#include <ATen/CPUGeneratorImpl.h>
#include <torch/torch.h>

#include <algorithm>
#include <cmath>

namespace lockstep::fuzz {
namespace {

// Relative differences below this may turn out the other way in the dtype of the plan.
double margin(const TrainerPlan& plan) { return plan.dtype == torch::kFloat64 ? 1e-8 : 1e-3; }

torch::Tensor flat_of(const std::vector<torch::Tensor>& parts) {
  std::vector<torch::Tensor> flat;
  for (const torch::Tensor& part : parts) flat.push_back(part.flatten());
  return torch::cat(flat);
}

}  // namespace

// The last parameters first; a bucket ends before the parameter that would make it too large.
ReferenceHook::ReferenceHook(const TrainerPlan& plan, const Tensors& parameters, const std::vector<size_t>& exchanged,
                             int ranks)
    : plan_(plan), parameters_(parameters) {
  const size_t limit = plan.small_buckets ? kSmallBucket : size_t{25} << 20;
  size_t bytes = 0;
  for (auto i = exchanged.rbegin(); i != exchanged.rend(); ++i) {
    const size_t more = static_cast<size_t>(parameters[*i].numel()) * c10::elementSize(plan.dtype);
    if (buckets_.empty() || bytes + more > limit) {
      buckets_.emplace_back();
      bytes = 0;
    }
    buckets_.back().parameters.push_back(*i);
    bytes += more;
  }
  for (Bucket& bucket : buckets_) {
    int64_t count = 0;
    for (const size_t i : bucket.parameters) count += parameters[i].numel();
    for (int rank = 0; rank < ranks; ++rank) bucket.residuals.push_back(torch::zeros({count}, torch::kFloat64));
  }
}

ReferenceHook::Tensors ReferenceHook::sum_of(const std::vector<Tensors>& given, double unit) {
  const torch::NoGradGuard no_grad;
  Tensors sums(parameters_.size());
  for (size_t b = 0; b < buckets_.size(); ++b) {
    Bucket& bucket = buckets_[b];
    Tensors flat, parts;
    for (const Tensors& of_rank : given) {
      Tensors all;
      for (const size_t i : bucket.parameters)
        all.push_back(of_rank[i].defined() ? of_rank[i] : torch::zeros_like(parameters_[i]));
      flat.push_back(flat_of(all));
    }
    for (size_t rank = 0; rank < given.size(); ++rank)
      bucket.residuals[rank] = bucket.residuals[rank] * (unit_ / unit) + flat[rank];
    torch::Tensor sum = plan_.hook == Hook::kTopK     ? top_k(bucket)
                        : plan_.hook == Hook::kTwoBit ? two_bits(bucket)
                                                      : power_sgd(bucket, b, flat);
    for (const size_t i : bucket.parameters) {
      sums[i] = sum.slice(0, 0, parameters_[i].numel()).view(parameters_[i].sizes()).clone();
      sum = sum.slice(0, parameters_[i].numel());
    }
  }
  unit_ = unit;
  return sums;
}

torch::Tensor ReferenceHook::top_k(Bucket& bucket) {
  torch::Tensor sum = torch::zeros_like(bucket.residuals[0]);
  const int64_t count = sum.numel();
  const auto k = std::max<int64_t>(1, static_cast<int64_t>(std::ceil(kTopKShare * static_cast<double>(count))));
  for (torch::Tensor& residual : bucket.residuals) {
    const auto [sizes, order] = residual.abs().sort(0, /*descending=*/true);
    if (k < count) {
      const double last = sizes[k - 1].item<double>(), next = sizes[k].item<double>();
      undecided_ = undecided_ || (last > margin(plan_) * margin(plan_) && last - next < margin(plan_) * last);
    }
    const torch::Tensor sent = order.slice(0, 0, k);
    sum.index_add_(0, sent, residual.index_select(0, sent));
    residual.index_fill_(0, sent, 0);
  }
  return sum;
}

torch::Tensor ReferenceHook::two_bits(Bucket& bucket) {
  torch::Tensor sum = torch::zeros_like(bucket.residuals[0]);
  for (torch::Tensor& residual : bucket.residuals) {
    const torch::Tensor distance = (residual.abs() - kTwoBitThreshold).abs();
    undecided_ = undecided_ || distance.lt(margin(plan_) * kTwoBitThreshold).any().item<bool>();
    const torch::Tensor sent =
        torch::where(residual.abs() >= kTwoBitThreshold, residual.sign() * kTwoBitThreshold, 0.0);
    sum += sent;
    residual -= sent;
  }
  return sum;
}

// Matrices for which that is shorter go as products of rank 1, the others as they are, without a residual.
torch::Tensor ReferenceHook::power_sgd(Bucket& bucket, size_t number, const Tensors& given) {
  torch::Tensor sum = torch::zeros_like(given[0]);
  for (const torch::Tensor& of_rank : given) sum += of_rank;
  const auto generator = at::make_generator<at::CPUGeneratorImpl>(number);  // PowerSGDOptions::seed is 0
  const bool first = bucket.bases.empty();
  int64_t begin = 0;
  size_t matrix = 0;
  for (const size_t i : bucket.parameters) {
    const int64_t size = parameters_[i].numel(), rows = parameters_[i].size(0), columns = size / rows;
    const auto place = [&](const torch::Tensor& flat) { return flat.slice(0, begin, begin + size); };
    if (parameters_[i].dim() == 2 && rows + columns < size) {
      if (first) bucket.bases.push_back(torch::randn({columns, 1}, generator).to(torch::kFloat64));
      Tensors matrices;
      for (const torch::Tensor& residual : bucket.residuals) matrices.push_back(place(residual).view({rows, columns}));
      place(sum).copy_(product_of_rank_1(matrices, bucket.bases[matrix++]).flatten());
    } else {
      for (const torch::Tensor& residual : bucket.residuals) place(residual).zero_();
    }
    begin += size;
  }
  return sum;
}

// Vogels, Karimireddy and Jaggi, "PowerSGD" (2019), algorithm 1, for the sum of all ranks' matrices; each rank keeps what
// its share of the product lacks.
torch::Tensor ReferenceHook::product_of_rank_1(Tensors matrices, torch::Tensor& basis) {
  torch::Tensor all = torch::zeros_like(matrices[0]);
  for (const torch::Tensor& matrix : matrices) all += matrix;
  torch::Tensor p = all.mm(basis);
  const double length = p.norm().item<double>(), size = all.norm().item<double>(),
               of_basis = basis.norm().item<double>();
  const double noise = plan_.dtype == torch::kFloat64 ? 1e-6 : 0.05;
  const bool nothing = size == 0 || of_basis == 0;  // exactly: then the first unit vector is taken
  undecided_ = undecided_ || (!nothing && (length <= noise * size * of_basis || size < noise));
  if (length > 0) p = p / length;
  if (nothing) p[0] = 1;
  basis = all.t().mm(p);
  const torch::Tensor product = p.mm(basis.t());
  for (torch::Tensor& matrix : matrices) matrix -= product / static_cast<double>(matrices.size());
  return product;
}

}  // namespace lockstep::fuzz
