// SPDX-License-Identifier: Apache-2.0
#include "lockstep/strategy/pipeline/links.h"

#include "lockstep/strategy/pipeline/tensor_messages.h"

namespace lockstep {

class ThreadLinks::Link : public StageLink {
 public:
  Link(Device& device, Channel<Tensors>& out, Channel<Tensors>& in) : device_(device), out_(out), in_(in) {}
  void send(Tensors tensors) override { out_.send(device_, std::move(tensors)); }
  Tensors receive() override { return in_.receive(device_); }

 private:
  Device& device_;
  Channel<Tensors>& out_;
  Channel<Tensors>& in_;
};

ThreadLinks::ThreadLinks(int devices, int stages, std::size_t capacity) {
  for (int i = 0; i < devices; ++i)
    behind_.push_back((i + 1) % stages == 0 ? nullptr : std::make_unique<Channels>(capacity));
}

StageLinks ThreadLinks::of(Device& device) const {
  Channels* const before = device.index() == 0 ? nullptr : behind_[device.index() - 1].get();
  Channels* const behind = behind_[device.index()].get();
  StageLinks links;
  if (before != nullptr) links.before = std::make_unique<Link>(device, before->backward, before->forward);
  if (behind != nullptr) links.behind = std::make_unique<Link>(device, behind->forward, behind->backward);
  return links;
}

namespace {

constexpr int kForward = 0;  // tags
constexpr int kBackward = 1;

class MessageLink : public StageLink {
 public:
  MessageLink(const World& world, int peer, int tag_out, int tag_in)
      : world_(world), peer_(peer), tag_in_(tag_in), sender_(world, peer, tag_out) {}
  void send(Tensors tensors) override { sender_.send(tensors); }
  Tensors receive() override { return receive_tensors(world_, peer_, tag_in_); }
  void finish() override { sender_.finish(); }

 private:
  World world_;
  int peer_;
  int tag_in_;
  TensorSender sender_;
};

}  // namespace

StageLinks message_links(const World& stages) {
  const int stage = stages.rank();
  StageLinks links;
  if (stage > 0) links.before = std::make_unique<MessageLink>(stages, stage - 1, kBackward, kForward);
  if (stage + 1 < stages.size()) links.behind = std::make_unique<MessageLink>(stages, stage + 1, kForward, kBackward);
  return links;
}

}  // namespace lockstep
