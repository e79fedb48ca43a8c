// SPDX-License-Identifier: Apache-2.0
#include "lockstep/gradient/sparse_exchange.h"

namespace lockstep {
namespace {

torch::Tensor rows_of(const torch::Tensor& gradient) {
  return gradient.layout() == torch::kSparse ? gradient.coalesce() : gradient.to_sparse(1);
}

torch::Tensor no_rows_of(const torch::Tensor& parameter) {
  auto sizes = parameter.sizes().vec();
  sizes[0] = 0;
  return torch::sparse_coo_tensor(torch::empty({1, 0}, parameter.options().dtype(torch::kInt64).requires_grad(false)),
                                  torch::empty(sizes, parameter.options().requires_grad(false)), parameter.sizes())
      ._coalesced_(true);
}

}  // namespace

torch::Tensor sum_of_rows(const World& world, const torch::Tensor& parameter, double factor) {
  const torch::NoGradGuard no_grad;
  const torch::Tensor& gradient = parameter.grad();
  const bool counts = gradient.defined() && factor != 0;
  const torch::Tensor mine = counts ? rows_of(gradient) : no_rows_of(parameter);
  const torch::Tensor indices = world.all_gather_rows(mine.indices()[0].contiguous());
  const torch::Tensor values = world.all_gather_rows((mine.values() * factor).contiguous());
  if (indices.numel() == 0) return {};
  return torch::sparse_coo_tensor(indices.unsqueeze(0), values, parameter.sizes()).coalesce();
}

}  // namespace lockstep
