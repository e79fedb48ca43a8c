// SPDX-License-Identifier: Apache-2.0
#include "lockstep/model/parameters.h"

#include <torch/csrc/utils/tensor_flatten.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/normalization.h>

#include <map>
#include <unordered_set>

#include "lockstep/base/int_vector.h"
#include "lockstep/base/text.h"
#include "lockstep/error.h"

namespace lockstep {
namespace {

template <class Dict>
NamedTensors once_each(const Dict& dict) {
  NamedTensors tensors;
  std::unordered_set<const void*> seen;
  for (const auto& item : dict)
    if (item.value().defined() && seen.insert(item.value().unsafeGetTensorImpl()).second)
      tensors.push_back({item.key(), item.value()});
  return tensors;
}

std::string signature(const NamedTensors& tensors) {
  std::vector<std::string> lines;
  for (const auto& [name, tensor] : tensors)
    lines.push_back(concat(name, " ", tensor.dtype().name(), tensor.sizes(), " strides ", tensor.strides(),
                           tensor.requires_grad() ? " trained" : " frozen"));
  return join(lines, "\n");
}

MismatchError models_differ(int other, const std::string& mine, const std::string& theirs, const World& world) {
  const auto my_lines = split(mine, '\n');
  const auto their_lines = split(theirs, '\n');
  size_t i = 0;
  while (i < my_lines.size() && i < their_lines.size() && my_lines[i] == their_lines[i]) ++i;
  const auto line = [i](const auto& lines) { return i < lines.size() ? lines[i] : std::string("(no such tensor)"); };
  return MismatchError({.what = concat("the models of rank 0 and rank ", other, " differ at tensor ", i, ": ",
                                       line(my_lines), " on rank 0, ", line(their_lines), " on rank ", other),
                        .here = world.describe(),
                        .likely = "a model whose construction depends on the rank, or another version of the program",
                        .next = "build the same model on every rank"});
}

// Scale and shift of a normalisation are vectors, but for a LayerNorm over several dimensions.
bool is_norm(const torch::nn::Module& module) {
  const auto is_vector = [](const Tensor& parameter) { return parameter.dim() <= 1; };
  return dynamic_cast<const torch::nn::LayerNormImpl*>(&module) != nullptr ||
         std::ranges::all_of(module.parameters(/*recurse=*/false), is_vector);
}

}  // namespace

NamedTensors named_parameters(const torch::nn::Module& model) { return once_each(model.named_parameters()); }

NamedTensors named_buffers(const torch::nn::Module& model) { return once_each(model.named_buffers()); }

NamedTensors trainable(NamedTensors parameters) {
  std::erase_if(parameters, [](const NamedTensor& parameter) { return !parameter.tensor.requires_grad(); });
  return parameters;
}

Tensors tensors_of(const NamedTensors& named) {
  Tensors tensors;
  for (const auto& [name, tensor] : named) tensors.push_back(tensor);
  return tensors;
}

NamedTensors named_tensors(const torch::nn::Module& model) {
  NamedTensors tensors = named_parameters(model);
  std::ranges::move(named_buffers(model), std::back_inserter(tensors));
  return tensors;
}

Tensors tensors_of(const torch::nn::Module& model) { return tensors_of(named_tensors(model)); }

std::set<std::string> sparse_parameters(const torch::nn::Module& model) {
  std::unordered_set<const void*> sparse;
  const auto note = [&](const auto* embedding) {
    if (embedding != nullptr && embedding->options.sparse()) sparse.insert(embedding->weight.unsafeGetTensorImpl());
  };
  const auto look_at = [&](const torch::nn::Module& module) {
    note(module.as<torch::nn::Embedding>());
    note(module.as<torch::nn::EmbeddingBag>());
  };
  look_at(model);
  for (const auto& module : model.modules(/*include_self=*/false)) look_at(*module);
  std::set<std::string> names;
  for (const auto& [name, tensor] : named_parameters(model))
    if (sparse.contains(tensor.unsafeGetTensorImpl())) names.insert(name);
  return names;
}

Tensors norms_and_biases(const torch::nn::Module& model, const std::string& kinds) {
  std::set<std::string> wanted;
  for (const std::string& kind : split(kinds, ',')) wanted.insert(kind);
  for (const std::string& kind : wanted)
    if (kind != "norm" && kind != "bias")
      throw UsageError({.what = concat("--no-decay ", kinds), .next = "give norm, bias, or norm,bias"});
  Tensors found;
  for (const auto& module : model.modules()) {
    const bool is_spared = wanted.contains("norm") && is_norm(*module);
    for (const auto& parameter : module->named_parameters(/*recurse=*/false))
      if (is_spared || (wanted.contains("bias") && parameter.key().ends_with("bias")))
        found.push_back(parameter.value());
  }
  return found;
}

Tensor dense_view(const Tensor& tensor) {
  if (!tensor.is_non_overlapping_and_dense())
    throw UsageError({.what = concat("a tensor of shape ", tensor.sizes(), " and strides ", tensor.strides(),
                                     " has gaps or overlaps in memory"),
                      .likely = "a parameter that is an expanded or sliced view",
                      .next = "call .contiguous() on it before the module registers it"});
  return tensor.detach().as_strided({tensor.numel()}, {1});
}

void require_same_model(const World& world, const NamedTensors& tensors) {
  const IntVector<std::string> signatures = world.exchange_texts(signature(tensors));
  for (int rank = 1; rank < world.size(); ++rank)
    if (signatures[rank] != signatures[0]) throw models_differ(rank, signatures[0], signatures[rank], world);
}

void broadcast_tensors(const World& world, const NamedTensors& tensors, int root) {
  if (world.size() == 1) return;
  const torch::NoGradGuard no_grad;
  std::map<torch::ScalarType, Tensors> by_dtype;
  for (const auto& [name, tensor] : tensors) by_dtype[tensor.scalar_type()].push_back(dense_view(tensor));
  for (auto& [dtype, views] : by_dtype) {
    Tensor flat = torch::cat(views);
    if (world.device().is_cpu()) flat = flat.cpu();  // several GPUs in each rank: by way of the host
    world.broadcast(flat, root);
    at::_foreach_copy_(views, torch::utils::unflatten_dense_tensors(flat, views));
  }
}

void broadcast_model(const World& world, const torch::nn::Module& model, int root) {
  broadcast_tensors(world, named_tensors(model), root);
}

}  // namespace lockstep
