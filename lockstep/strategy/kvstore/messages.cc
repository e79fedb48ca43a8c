// SPDX-License-Identifier: Apache-2.0
#include "lockstep/strategy/kvstore/messages.h"

#include "lockstep/base/text.h"
#include "lockstep/strategy/pipeline/tensor_messages.h"

namespace lockstep {
namespace {

constexpr int kTag = 0;

torch::Tensor to_tensor(const std::string& text) {
  torch::Tensor bytes = torch::empty({std::ssize(text)}, torch::kUInt8);
  text.copy(static_cast<char*>(bytes.mutable_data_ptr()), text.size());
  return bytes;
}

std::string to_text(const torch::Tensor& bytes) {
  return {static_cast<const char*>(bytes.const_data_ptr()), bytes.nbytes()};
}

}  // namespace

// One list of tensors: the value, the names of the optimizer's tensors with spaces between them, those tensors.
void send_state(const World& world, int to, const SliceState& slice) {
  std::vector<std::string> names;
  Tensors tensors{slice.value, {}};
  for (const auto& [name, tensor] : slice.state) {
    names.push_back(name);
    tensors.push_back(tensor);
  }
  tensors[1] = to_tensor(join(names, " "));
  TensorSender sender(world, to, kTag);
  sender.send(tensors);
  sender.finish();
}

SliceState receive_state(const World& world, int from) {
  const Tensors tensors = receive_tensors(world, from, kTag);
  SliceState slice{.value = tensors[0], .state = {}};
  if (tensors.size() == 2) return slice;
  const auto names = split(to_text(tensors[1]), ' ');
  for (std::size_t i = 0; i < names.size(); ++i) slice.state[names[i]] = tensors[2 + i];
  return slice;
}

}  // namespace lockstep
