// SPDX-License-Identifier: Apache-2.0
#include "lockstep/task.h"

#include <unordered_set>

namespace lockstep {

Piece make_piece(std::string name, std::vector<torch::nn::Module*> modules,
                 std::function<Tensor(const Tensor&)> forward) {
  return {.name = std::move(name),
          .modules = std::move(modules),
          .forward = [forward = std::move(forward)](const Tensors& in) { return Tensors{forward(in.at(0))}; }};
}

Piece on_tensor(size_t index, Piece piece) {
  piece.forward = [index, forward = std::move(piece.forward)](const Tensors& in) {
    Tensors out = in;
    out.at(index) = forward({in.at(index)}).at(0);
    return out;
  };
  return piece;
}

std::vector<Piece> pieces_of(torch::nn::SequentialImpl& model) {
  const auto names = model.named_children().keys();
  std::vector<Piece> pieces;
  for (torch::nn::AnyModule& module : model)
    pieces.push_back(make_piece(names[pieces.size()], {module.ptr().get()},
                                [&module](const Tensor& data) { return module.forward<Tensor>(data); }));
  return pieces;
}

Tensors inputs_of(const Batch& batch) {
  Tensors inputs = {batch.data};
  for (const auto& [name, tensor] : batch.more) inputs.push_back(tensor);
  return inputs;
}

Tensor run_pieces(const std::vector<Piece>& pieces, const Batch& batch) {
  Tensors tensors = inputs_of(batch);
  for (const Piece& piece : pieces) tensors = piece.forward(tensors);
  return tensors.at(0);
}

Tensors parameters_of(const std::vector<Piece>& pieces) {
  Tensors parameters;
  std::unordered_set<const void*> seen;
  for (const Piece& piece : pieces)
    for (const torch::nn::Module* module : piece.modules)
      for (const Tensor& parameter : module->parameters())
        if (parameter.requires_grad() && seen.insert(parameter.unsafeGetTensorImpl()).second)
          parameters.push_back(parameter);
  return parameters;
}

}  // namespace lockstep
