// SPDX-License-Identifier: Apache-2.0
#include "lockstep/strategy/ddp/virtual_shards.h"

namespace lockstep {
namespace {

Tensors copies_of(const std::vector<NamedTensor>& tensors) {
  Tensors copies;
  for (const auto& [name, tensor] : tensors) copies.push_back(tensor.detach().clone());
  return copies;
}

void set_values(const std::vector<NamedTensor>& tensors, const Tensors& values) {
  const torch::NoGradGuard no_grad;
  for (std::size_t i = 0; i < tensors.size(); ++i) torch::Tensor(tensors[i].tensor).copy_(values[i]);
}

}  // namespace

ShardBuffers::ShardBuffers(std::vector<NamedTensor> buffers, int shards)
    : buffers_(std::move(buffers)), shards_(shards) {
  begin_step();
}

bool ShardBuffers::finish_shard() {
  if (shards_ == 0) return true;
  if (done_ == 0) after_first_ = copies_of(buffers_);
  if (++done_ < shards_) {
    set_values(buffers_, at_beginning_);
    return false;
  }
  set_values(buffers_, after_first_);
  done_ = 0;
  return true;
}

void ShardBuffers::begin_step() {
  if (shards_ > 0) at_beginning_ = copies_of(buffers_);
}

}  // namespace lockstep
