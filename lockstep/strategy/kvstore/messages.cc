// SPDX-License-Identifier: Apache-2.0
#include "lockstep/strategy/kvstore/messages.h"

#include "lockstep/strategy/pipeline/tensor_messages.h"

namespace lockstep {

void send_state(const Link& link, const SliceState& slice) {
  link.send(slice.place);
  TensorSender sender(link.world(), link.peer(), /*tag=*/0);
  sender.send({slice.value});
  sender.send(message_of(slice.state));
  sender.finish();
}

SliceState receive_state(const Link& link) {
  const auto place = link.receive<KeySlice>();
  const auto next = [&link] { return receive_tensors(link.world(), link.peer(), /*tag=*/0); };
  const torch::Tensor value = next().front();
  return {.place = place, .value = value, .state = state_in(next())};
}

}  // namespace lockstep
