// SPDX-License-Identifier: Apache-2.0
#include "lockstep/strategy/pipeline/tensor_messages.h"

#include "lockstep/base/text.h"
#include "lockstep/base/to_size.h"
#include "lockstep/error.h"

namespace lockstep {
namespace {

constexpr std::size_t kHeaderWords = 96;
constexpr std::int64_t kUndefined = -1;

// count; then dtype, whether it is on the host, requires_grad, memory format, dimensions and sizes of each
torch::Tensor header_of(const Tensors& tensors) {
  std::vector<std::int64_t> words = {static_cast<std::int64_t>(tensors.size())};
  for (const torch::Tensor& tensor : tensors) {
    words.push_back(tensor.defined() ? static_cast<std::int64_t>(tensor.scalar_type()) : kUndefined);
    if (!tensor.defined()) continue;
    const auto format = static_cast<std::int64_t>(tensor.suggest_memory_format());
    words.insert(words.end(), {tensor.is_cpu(), tensor.requires_grad(), format, tensor.dim()});
    words.insert(words.end(), tensor.sizes().begin(), tensor.sizes().end());
  }
  if (words.size() > kHeaderWords)
    throw UsageError({.what = concat(tensors.size(), " tensors in one message between stages"),
                      .likely = "a piece that returns very many tensors",
                      .next = "cut the model elsewhere, or stack them"});
  words.resize(kHeaderWords);
  return torch::tensor(words, torch::kInt64);
}

// An empty tensor as the header describes it from `word` on, which moves behind it.
torch::Tensor next_tensor(const std::int64_t*& word, torch::Device device) {
  const std::int64_t dtype = *word++;
  if (dtype == kUndefined) return {};
  const bool on_host = *word++ != 0;
  const bool requires_grad = *word++ != 0;
  const auto format = static_cast<torch::MemoryFormat>(*word++);
  const torch::IntArrayRef sizes(word + 1, to_size(*word));
  word += 1 + sizes.size();
  const auto options =
      torch::TensorOptions().dtype(static_cast<torch::ScalarType>(dtype)).device(on_host ? torch::kCPU : device);
  return torch::empty(sizes, options, format).requires_grad_(requires_grad);
}

}  // namespace

void TensorSender::send(const Tensors& tensors) {
  forget_received();
  under_way_.push_back(world_.send_async(header_of(tensors), to_, tag_));
  for (const torch::Tensor& tensor : tensors)
    if (tensor.defined() && tensor.numel() > 0)
      under_way_.push_back(world_.send_async(tensor.detach().contiguous(tensor.suggest_memory_format()), to_, tag_));
}

// What has been received need not stay in memory until finish().
void TensorSender::forget_received() {
  while (!under_way_.empty() && under_way_.front().done()) {
    under_way_.front().wait();  // throws its error
    under_way_.pop_front();
  }
}

void TensorSender::finish() {
  for (Work& work : under_way_) work.wait();
  under_way_.clear();
}

Tensors receive_tensors(const World& world, int from, int tag) {
  const torch::Tensor header = torch::empty({static_cast<std::int64_t>(kHeaderWords)}, torch::kInt64);
  world.receive(header, {.from = from, .tag = tag});
  const auto* word = header.const_data_ptr<std::int64_t>();
  Tensors tensors(to_size(*word++));
  for (torch::Tensor& tensor : tensors) {
    tensor = next_tensor(word, world.device());
    if (tensor.defined() && tensor.numel() > 0) world.receive(tensor.detach(), {.from = from, .tag = tag});
  }
  return tensors;
}

Tensors message_of(const Optimizer::StateTensors& state) {
  Tensors message;
  for (const auto& [name, tensor] : state) {
    message.push_back(torch::tensor(std::vector<std::uint8_t>(name.begin(), name.end()), torch::kUInt8));
    message.push_back(tensor);
  }
  return message;
}

Optimizer::StateTensors state_in(const Tensors& message) {
  Optimizer::StateTensors state;
  for (std::size_t i = 0; i < message.size(); i += 2) {
    const auto* name = message[i].const_data_ptr<std::uint8_t>();
    state[std::string(name, name + message[i].numel())] = message[i + 1];
  }
  return state;
}

}  // namespace lockstep
