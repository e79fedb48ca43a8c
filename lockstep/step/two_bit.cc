// SPDX-License-Identifier: Apache-2.0
#include "lockstep/step/two_bit.h"

namespace lockstep {
namespace {

torch::Tensor values(const torch::Tensor& codes, double threshold, const torch::TensorOptions& options) {
  return (codes.eq(1).to(options) - codes.eq(2).to(options)) * threshold;
}

torch::Tensor shifts(const torch::Tensor& like) { return torch::arange(0, 32, 2, like.options()); }

}  // namespace

// The codes are filled up with zeros to (words, 16); each is shifted to its two bits, and the sum of a row is one word,
// because no two codes of a row share a bit.
torch::Tensor take_two_bits(torch::Tensor residual, double threshold) {
  const torch::Tensor codes = residual.ge(threshold).to(torch::kInt32) + residual.le(-threshold).to(torch::kInt32) * 2;
  residual.sub_(values(codes, threshold, residual.options()));
  const int64_t words = two_bit_words(codes.numel());
  const torch::Tensor padded = torch::constant_pad_nd(codes, {0, words * 16 - codes.numel()}).view({words, 16});
  return torch::bitwise_left_shift(padded, shifts(codes)).sum(1, /*keepdim=*/false, torch::kInt32);
}

torch::Tensor from_two_bits(const torch::Tensor& words, int64_t count, double threshold,
                            const torch::TensorOptions& options) {
  const torch::Tensor codes = torch::bitwise_right_shift(words.unsqueeze(1), shifts(words)).bitwise_and(3);
  return values(codes.flatten().slice(0, 0, count), threshold, options);
}

}  // namespace lockstep
