// SPDX-License-Identifier: Apache-2.0
#include "lockstep/strategy/pipeline/tensor_messages.h"

#include <algorithm>
#include <limits>
#include <span>

#include "lockstep/base/sockets/received.h"
#include "lockstep/base/text.h"
#include "lockstep/base/to_size.h"
#include "lockstep/error.h"

namespace lockstep {
namespace {

constexpr int64_t kHeaderWords = 96;
constexpr int64_t kUndefined = -1;

// count; then dtype, whether it is on the host, requires_grad, memory format, dimensions and sizes of each
Tensor header_of(const Tensors& tensors) {
  std::vector<int64_t> words = {to_int64(tensors.size())};
  for (const Tensor& tensor : tensors) {
    words.push_back(tensor.defined() ? static_cast<int64_t>(tensor.scalar_type()) : kUndefined);
    if (!tensor.defined()) continue;
    const auto format = static_cast<int64_t>(tensor.suggest_memory_format());
    words.insert(words.end(), {tensor.is_cpu(), tensor.requires_grad(), format, tensor.dim()});
    words.insert(words.end(), tensor.sizes().begin(), tensor.sizes().end());
  }
  if (std::ssize(words) > kHeaderWords)
    throw UsageError({.what = concat(tensors.size(), " tensors in one message between stages"),
                      .next = "cut the model elsewhere, or stack them"});
  words.resize(kHeaderWords);
  return torch::tensor(words, torch::kInt64);
}

// Reads a header, of which every number is checked before it is used: it comes from another process.
class HeaderReader {
 public:
  HeaderReader(const Tensor& header, int from)
      : words_(header.const_data_ptr<int64_t>(), kHeaderWords), sender_(concat("rank ", from)) {}

  int64_t next(const std::string& name, int64_t least, int64_t most) {
    sender_.require(at_ < words_.size(), concat("no place for ", name));
    return sender_.in(words_[at_++], least, most, name);
  }

  // An empty tensor as the header describes it.
  Tensor next_tensor(torch::Device device) {
    const int64_t dtype = next("dtype", kUndefined, std::numeric_limits<int8_t>::max());
    if (dtype == kUndefined) return {};
    sender_.require(is_dtype(dtype), concat("unknown dtype ", dtype));
    const bool on_host = next("whether it is on the host", 0, 1) != 0;
    const bool requires_grad = next("requires_grad", 0, 1) != 0;
    const auto format = static_cast<torch::MemoryFormat>(
        next("memory format", 0, static_cast<int64_t>(torch::MemoryFormat::ChannelsLast3d)));
    const auto options =
        torch::TensorOptions().dtype(static_cast<torch::ScalarType>(dtype)).device(on_host ? torch::kCPU : device);
    const std::vector<int64_t> sizes = next_sizes(options);
    sender_.require(suits(format, sizes.size()), concat("memory format ", format, " of ", sizes.size(), " dimensions"));
    sender_.require(!requires_grad || !c10::isIntegralType(options.dtype().toScalarType(), /*includeBool=*/true),
                    "integers that require gradients");
    return torch::empty(sizes, options, format).requires_grad_(requires_grad);
  }

 private:
  static bool suits(torch::MemoryFormat format, size_t dimensions) {
    if (format == torch::MemoryFormat::Contiguous) return true;
    return format == torch::MemoryFormat::ChannelsLast
               ? dimensions == 4
               : format == torch::MemoryFormat::ChannelsLast3d && dimensions == 5;
  }

  std::vector<int64_t> next_sizes(const torch::TensorOptions& options) {
    std::vector<int64_t> sizes(to_size(next("dimensions", 0, kHeaderWords)));
    int64_t elements = 1;
    for (int64_t& size : sizes) {
      size = next("size", 0, std::numeric_limits<int64_t>::max());
      sender_.require(!__builtin_mul_overflow(elements, std::max<int64_t>(size, 1), &elements), "too many elements");
    }
    sender_.bytes(elements, to_int64(options.dtype().itemsize()), "a tensor");
    return sizes;
  }

  std::span<const int64_t> words_;
  size_t at_ = 0;
  Received sender_;
};

}  // namespace

void TensorSender::send(const Tensors& tensors) {
  forget_received();
  under_way_.push_back(world_.send_async(header_of(tensors), to_, tag_));
  for (const Tensor& tensor : tensors)
    if (tensor.defined() && tensor.numel() > 0)
      under_way_.push_back(world_.send_async(tensor.detach().contiguous(tensor.suggest_memory_format()), to_, tag_));
}

// Tensors that have been received need not stay in memory until finish().
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
  const Tensor header = torch::empty({kHeaderWords}, torch::kInt64);
  world.receive(header, {.from = from, .tag = tag});
  HeaderReader reader(header, from);
  Tensors tensors(to_size(reader.next("number of tensors", 0, kHeaderWords)));
  for (Tensor& tensor : tensors) tensor = reader.next_tensor(world.device());
  for (const Tensor& tensor : tensors)
    if (tensor.defined() && tensor.numel() > 0) world.receive(tensor.detach(), {.from = from, .tag = tag});
  return tensors;
}

bool is_dtype(int64_t number) {
  if (number < 0 || number >= static_cast<int64_t>(torch::ScalarType::NumOptions)) return false;
  const auto dtype = static_cast<torch::ScalarType>(number);
  return c10::isFloatingType(dtype) || c10::isComplexType(dtype) || c10::isIntegralType(dtype, /*includeBool=*/true);
}

Tensor bytes_of_text(const std::string& text) {
  return torch::tensor(std::vector<uint8_t>(text.begin(), text.end()), torch::kUInt8);
}

std::string text_in(const Tensor& bytes) { return {static_cast<const char*>(bytes.const_data_ptr()), bytes.nbytes()}; }

Tensors message_of(const Optimizer::StateTensors& state) {
  Tensors message;
  for (const auto& [name, tensor] : state) {
    message.push_back(bytes_of_text(name));
    message.push_back(tensor);
  }
  return message;
}

Optimizer::StateTensors state_in(const Tensors& message) {
  const Received sender("the rank that has the optimizer's state");
  sender.require(message.size() % 2 == 0, concat("names and values, ", message.size(), " of them"));
  Optimizer::StateTensors state;
  for (size_t i = 0; i < message.size(); i += 2) {
    const Tensor& text = message[i];
    sender.require(text.defined() && text.scalar_type() == torch::kUInt8 && text.is_cpu() && text.is_contiguous() &&
                       message[i + 1].defined(),
                   "a name that is not text, or has no value");
    state[text_in(text)] = message[i + 1];
  }
  return state;
}

}  // namespace lockstep
