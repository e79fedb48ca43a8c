// SPDX-License-Identifier: Apache-2.0
#include "lockstep/models.h"

#include <cmath>

#include "lockstep/base/text.h"
#include "lockstep/error.h"

namespace lockstep {
namespace {

namespace nn = torch::nn;

nn::LayerNorm norm(int64_t width) { return nn::LayerNorm(nn::LayerNormOptions({width})); }

class GPTBlockImpl : public nn::Module {
 public:
  explicit GPTBlockImpl(const GPTOptions& options) : o_(options) {}

  Tensor forward(const Tensor& x) {  // (B, T, width) -> the same
    const Tensor y = x + attend(ln_1_(x));
    return y + drop(mlp_proj_(torch::gelu(c_fc_(ln_2_(y)), "tanh")));
  }

 private:
  Tensor attend(const Tensor& x) {
    const auto per_head = [&](const Tensor& part) {  // (B, T, width) -> (B, heads, T, width / heads)
      return part.unflatten(2, {o_.heads, -1}).transpose(1, 2);
    };
    const auto parts = c_attn_(x).chunk(3, 2);
    const Tensor mixed =
        at::scaled_dot_product_attention(per_head(parts[0]), per_head(parts[1]), per_head(parts[2]), /*attn_mask=*/{},
                                         is_training() ? o_.dropout : 0.0, /*is_causal=*/true);
    return drop(attn_proj_(mixed.transpose(1, 2).flatten(2)));
  }

  Tensor drop(const Tensor& x) const { return torch::dropout(x, o_.dropout, is_training()); }

  nn::Linear linear(const char* name, int64_t in, int64_t out) { return register_module(name, nn::Linear(in, out)); }

  const GPTOptions o_;
  nn::LayerNorm ln_1_ = register_module("ln_1", norm(o_.width));
  nn::Linear c_attn_ = linear("c_attn", o_.width, 3 * o_.width);  // query, key and value in one
  nn::Linear attn_proj_ = linear("attn_proj", o_.width, o_.width);
  nn::LayerNorm ln_2_ = register_module("ln_2", norm(o_.width));
  nn::Linear c_fc_ = linear("c_fc", o_.width, 4 * o_.width);
  nn::Linear mlp_proj_ = linear("mlp_proj", 4 * o_.width, o_.width);
};

// Normal with deviation 0.02; what is added to the residual stream is smaller by the root of how often that happens.
void initialise_normal(nn::Module& model, int64_t layers) {
  const torch::NoGradGuard no_grad;
  const double residual = 0.02 / std::sqrt(2.0 * static_cast<double>(layers));
  for (auto& item : model.named_parameters()) {
    if (item.key().ends_with("bias"))
      item.value().zero_();
    else if (item.value().dim() == 2)
      item.value().normal_(0, item.key().ends_with("proj.weight") ? residual : 0.02);
  }
}

}  // namespace

GPTImpl::GPTImpl(const GPTOptions& options) {
  if (options.heads <= 0 || options.width % options.heads != 0)
    throw UsageError({.what = concat("a GPT of width ", options.width, " with ", options.heads, " heads"),
                      .next = "choose a width that is a multiple of the heads"});
  const auto wte = register_module("wte", nn::Embedding(options.vocabulary, options.width));
  const auto wpe = register_module("wpe", nn::Embedding(options.context, options.width));
  add_piece("embed", {wte.get(), wpe.get()}, [wte, wpe, dropout = options.dropout](const Tensor& tokens) {
    const Tensor positions = torch::arange(tokens.size(1), tokens.options());
    return torch::dropout(wte->forward(tokens) + wpe->forward(positions), dropout, wte->is_training());
  });
  const auto h = register_module("h", nn::ModuleList());
  for (int64_t i = 0; i < options.layers; ++i) {
    const auto block = std::make_shared<GPTBlockImpl>(options);
    h->push_back(block);
    add_piece(concat("h.", i), {block.get()}, [block](const Tensor& x) { return block->forward(x); });
  }
  const auto ln_f = register_module("ln_f", norm(options.width));
  add_piece("head", {ln_f.get(), wte.get()},
            [ln_f, wte](const Tensor& x) { return torch::linear(ln_f->forward(x), wte->weight); });
  initialise_normal(*this, options.layers);
}

}  // namespace lockstep
