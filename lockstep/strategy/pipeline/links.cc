// SPDX-License-Identifier: Apache-2.0
#include "lockstep/strategy/pipeline/links.h"

#include <atomic>
#include <deque>

#include "lockstep/collective/traced_messages.h"
#include "lockstep/observe/trace.h"
#include "lockstep/strategy/devices/devices_state.h"
#include "lockstep/strategy/devices/gpu_team.h"
#include "lockstep/strategy/pipeline/tensor_messages.h"

namespace lockstep {
namespace {

// A bounded queue from one device's thread to another's. The mutex of the devices' state guards it.
class Channel {
 public:
  Channel(size_t capacity, int from, int to) : capacity_(capacity), from_(from), to_(to) {}

  // Blocks while the channel is full. Throws PeerLost.
  void send(Device& from, Tensors tensors) {
    const uint32_t sent = sent_++;
    const int64_t began = trace::now_if_recording(), bytes = began == 0 ? 0 : bytes_of(tensors);
    DevicesState& state = DevicesState::of(from);
    state.wait_on(from, "room in a channel", [&] { return queue_.size() < capacity_; });
    state.change([&] { queue_.push_back(std::move(tensors)); });
    trace::write(began, [&] {
      return trace::Event{.name = "send to device", .number = to_, .bytes = bytes, .flow = flow_of(sent)};
    });
  }

  // Blocks while the channel is empty. Throws PeerLost.
  Tensors receive(Device& at) {
    const uint32_t taken = taken_++;
    const int64_t began = trace::now_if_recording();
    DevicesState& state = DevicesState::of(at);
    state.wait_on(at, "what another stage sends", [&] { return !queue_.empty(); });
    Tensors tensors;
    state.change([&] {
      tensors = std::move(queue_.front());
      queue_.pop_front();
    });
    trace::write(began, [&] {
      return trace::Event{.name = "receive from device",
                          .number = from_,
                          .bytes = bytes_of(tensors),
                          .flow = flow_of(taken),
                          .arrives = true};
    });
    return tensors;
  }

 private:
  static int64_t bytes_of(const Tensors& tensors) {
    size_t bytes = 0;
    for (const Tensor& each : tensors) bytes += each.defined() ? each.nbytes() : 0;
    return to_int64(bytes);
  }

  static uint64_t next_id() {
    static std::atomic<uint64_t> last{0};
    return ++last;
  }

  uint64_t flow_of(uint32_t message) const { return mix_numbers(id_, message) | 1U; }

  const size_t capacity_;
  std::deque<Tensors> queue_;
  const int from_;
  const int to_;
  const uint64_t id_ = next_id();  // of this process's channels
  uint32_t sent_ = 0;              // messages, counted by the sender
  uint32_t taken_ = 0;             // by the receiver
};

struct Channels {
  Channels(size_t capacity, int device)
      : forward(capacity, device, device + 1), backward(capacity, device + 1, device) {}
  Channel forward;
  Channel backward;
};

StageLink channel_link(Device& device, Channel& out, Channel& in) {
  return {.send = [&](Tensors tensors) { out.send(device, std::move(tensors)); },
          .receive = [&] { return received_on(device.where(), in.receive(device)); }};
}

// Messages in one direction of the pipeline.
struct MessageStream {
  World world;
  int tag;
};

StageLink message_link(int peer, const MessageStream& out, const MessageStream& in) {
  const auto sender = std::make_shared<TensorSender>(out.world, peer, out.tag);
  return {.send = [sender](const Tensors& tensors) { sender->send(tensors); },
          .receive =
              [in, peer, sender] {
                Tensors tensors = receive_tensors(in.world, peer, in.tag);
                sender->forget_received();  // they may be the answer to what was sent
                return tensors;
              },
          .finish = [sender] { sender->finish(); }};
}

}  // namespace

Tensors received_on(torch::Device device, const Tensors& tensors) {
  if (device.is_cpu()) return tensors;
  Tensors received;
  for (const Tensor& each : tensors)
    received.push_back(!each.defined() || each.is_cpu()
                           ? each
                           : brought_to(device, each.detach()).requires_grad_(each.requires_grad()));
  return received;
}

std::function<StageLinks(Device&)> thread_links(int devices, int stages, size_t capacity) {
  IntVector<std::shared_ptr<Channels>> behind;  // of each device
  for (int i = 0; i < devices; ++i) behind.push_back(std::make_shared<Channels>(capacity, i));
  return [behind, stages](Device& device) {
    const int i = device.index();
    StageLinks links;
    if (i % stages > 0) links.before = channel_link(device, behind[i - 1]->backward, behind[i - 1]->forward);
    if ((i + 1) % stages > 0) links.behind = channel_link(device, behind[i]->forward, behind[i]->backward);
    return links;
  };
}

StageLinks message_links(const World& forward, const World& back) {
  const MessageStream activations{forward, 0}, gradients{back, 1};
  const int stage = forward.rank();
  StageLinks links;
  if (stage > 0) links.before = message_link(stage - 1, gradients, activations);
  if (stage + 1 < forward.size()) links.behind = message_link(stage + 1, activations, gradients);
  return links;
}

}  // namespace lockstep
