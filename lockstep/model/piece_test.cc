// SPDX-License-Identifier: Apache-2.0
#include "lockstep/task.h"

#include <gtest/gtest.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/linear.h>

namespace lockstep {
namespace {

TEST(Piece, cuts_a_sequential_between_its_modules) {
  torch::nn::Sequential net(torch::nn::Linear(3, 4), torch::nn::ReLU(), torch::nn::Linear(4, 2));
  const auto pieces = pieces_of(*net);
  ASSERT_EQ(pieces.size(), 3U);
  EXPECT_EQ(pieces[2].name, "2");
  const torch::Tensor data = torch::rand({5, 3});
  EXPECT_TRUE(torch::equal(run_pieces(pieces, data), net->forward(data)));
}

TEST(Piece, passes_a_skip_connection_over_a_cut) {
  torch::nn::Linear inner(3, 3);
  const std::vector<Piece> pieces = {{"in",
                                      {inner.get()},
                                      [&](const Tensors& x) {
                                        return Tensors{inner(x[0]), x[0]};
                                      }},
                                     {"out", {}, [](const Tensors& x) { return Tensors{x[0] + x[1]}; }}};
  const torch::Tensor data = torch::rand({2, 3});
  EXPECT_TRUE(torch::equal(run_pieces(pieces, data), inner(data) + data));
}

TEST(Piece, works_on_one_of_several_tensors) {
  const Piece doubled = on_tensor(1, make_piece("twice", {}, [](const torch::Tensor& x) { return 2 * x; }));
  const Tensors out = doubled.forward({torch::ones({2}), torch::ones({3}), torch::zeros({1})});
  ASSERT_EQ(out.size(), 3U);
  EXPECT_TRUE(torch::equal(out[0], torch::ones({2})));
  EXPECT_TRUE(torch::equal(out[1], 2 * torch::ones({3})));
  EXPECT_TRUE(torch::equal(out[2], torch::zeros({1})));
}

TEST(Piece, counts_a_tied_parameter_once_and_a_frozen_one_never) {
  torch::nn::Linear tied(3, 3);
  tied->bias.set_requires_grad(false);
  const auto same = [](const torch::Tensor& x) { return x; };
  EXPECT_EQ(parameters_of({make_piece("in", {tied.get()}, same), make_piece("out", {tied.get()}, same)}).size(), 1U);
}

}  // namespace
}  // namespace lockstep
