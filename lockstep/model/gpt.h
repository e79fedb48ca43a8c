// model/gpt.h: a decoder-only transformer in the form of GPT-2, its output layer tied to its token embedding.
//
// tokens -> embedding + position -> blocks of (norm, causal attention, + ; norm, dense 4x, GELU, dense, +) -> norm ->
// times the embedding. With its defaults (GPT-2 small) 124,439,808 parameters.
// Source:  Radford et al., "Language models are unsupervised multitask learners" (2019)
#pragma once

#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>
#include <torch/nn/pimpl.h>

#include <cstdint>
#include <vector>

#include "lockstep/model/stage.h"

namespace lockstep {

struct GPTOptions {
  std::int64_t vocabulary = 50257;
  std::int64_t context = 1024;  // tokens in a sequence at most
  std::int64_t layers = 12;
  std::int64_t heads = 12;
  std::int64_t width = 768;  // a multiple of heads
  double dropout = 0.1;
};

class GPTBlockImpl : public torch::nn::Module {
 public:
  explicit GPTBlockImpl(const GPTOptions& options);
  torch::Tensor forward(const torch::Tensor& x);  // (B, T, width) -> the same

 private:
  torch::Tensor attend(const torch::Tensor& x);
  torch::Tensor drop(const torch::Tensor& x) const;

  std::int64_t heads_;
  double dropout_;
  torch::nn::LayerNorm ln_1_;
  torch::nn::Linear c_attn_;  // query, key and value in one
  torch::nn::Linear attn_proj_;
  torch::nn::LayerNorm ln_2_;
  torch::nn::Linear c_fc_;
  torch::nn::Linear mlp_proj_;
};
TORCH_MODULE(GPTBlock);

class GPTImpl : public torch::nn::Module {
 public:
  explicit GPTImpl(const GPTOptions& options = {});  // throws UsageError: heads that do not divide the width
  // tokens: (B, T) int64, T up to the context -> logits of the next token (B, T, vocabulary)
  torch::Tensor forward(const torch::Tensor& tokens);
  std::vector<Stage> stages();  // the embeddings, each block, the head (which uses the token embedding again)

 private:
  torch::Tensor embed(const torch::Tensor& tokens);
  torch::Tensor head(const torch::Tensor& x);
  void initialise();

  GPTOptions options_;
  torch::nn::Embedding wte_;
  torch::nn::Embedding wpe_;
  torch::nn::ModuleList h_;
  torch::nn::LayerNorm ln_f_;
};
TORCH_MODULE(GPT);

}  // namespace lockstep
