// SPDX-License-Identifier: Apache-2.0
#include "lockstep/strategy/pipeline/stage_tensors.h"

#include <algorithm>
#include <map>
#include <numeric>

#include "lockstep/base/to_size.h"
#include "lockstep/model/parameters.h"

namespace lockstep {
namespace {

Tensors tensors_in(const Piece& piece) {
  Tensors tensors;
  for (const torch::nn::Module* module : piece.modules)
    for (const Tensors& some : {module->parameters(), module->buffers()})
      tensors.insert(tensors.end(), some.begin(), some.end());
  return tensors;
}

}  // namespace

bool StagedTensor::is_used_by(int stage) const { return std::ranges::find(stages, stage) != stages.end(); }

StagedTensors stage_tensors(const torch::nn::Module& model, const std::vector<Piece>& pieces, const Cut& cut) {
  std::map<const void*, std::vector<int>> users;
  for (int stage = 0; stage < cut.size(); ++stage)
    for (const Piece& piece : pieces_in(pieces, cut[stage]))
      for (const torch::Tensor& tensor : tensors_in(piece)) {
        auto& stages = users[tensor.unsafeGetTensorImpl()];
        if (stages.empty() || stages.back() != stage) stages.push_back(stage);
      }
  std::vector<int> all(to_size(cut.size()));
  std::iota(all.begin(), all.end(), 0);
  StagedTensors staged;
  const auto add = [&](const std::vector<NamedTensor>& tensors, bool are_buffers) {
    for (const NamedTensor& each : tensors) {
      const auto found = users.find(each.tensor.unsafeGetTensorImpl());
      staged.push_back({each, found == users.end() ? all : found->second, are_buffers});
    }
  };
  add(named_parameters(model), false);
  add(named_buffers(model), true);
  return staged;
}

std::vector<double> bytes_of(const std::vector<Piece>& pieces) {
  std::vector<double> bytes;
  for (const Piece& piece : pieces) {
    bytes.push_back(1);
    for (const torch::Tensor& each : tensors_in(piece)) bytes.back() += static_cast<double>(each.nbytes());
  }
  return bytes;
}

}  // namespace lockstep
