#include "lockstep/collective/gloo_messages.h"

#include "lockstep/collective/gloo_connection.h"

namespace lockstep {
namespace {

// Gloo moves bytes of any dtype alike.
std::vector<torch::Tensor> bytes_of(const torch::Tensor& tensor) {
  return {tensor.detach().view(-1).view(torch::kUInt8)};
}

}  // namespace

GlooMessages::GlooMessages(const HostLink& link, std::string here)
    : gloo_(link.connection()), here_(std::move(here)) {}

GlooMessages::~GlooMessages() = default;

std::shared_ptr<Pending> GlooMessages::send(const torch::Tensor& tensor, int to, int tag) {
  return messages_.start({"send", here_}, [&] {
    auto tensors = bytes_of(tensor);
    return gloo_->send(tensors, to, tag);
  });
}

std::shared_ptr<Pending> GlooMessages::receive(const torch::Tensor& tensor, int from, int tag) {
  return messages_.start({"receive", here_}, [&] {
    auto tensors = bytes_of(tensor);
    return from == kAnyRank ? gloo_->recvAnysource(tensors, tag) : gloo_->recv(tensors, from, tag);
  });
}

}  // namespace lockstep
