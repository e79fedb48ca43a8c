// strategy/kvstore/slice_state.h: a slice's value and the optimizer's state, on its way from one server to the first:
// what a checkpoint keeps of a server.
#pragma once

#include "lockstep/optimizer.h"
#include "lockstep/strategy/kvstore/messages.h"

namespace lockstep {

struct SliceState {
  torch::Tensor value;
  Optimizer::StateTensors state;  // may be empty
};

// Block. Throw PeerLost.
void send_state(const World& world, int to, const SliceState& slice);
SliceState receive_state(const World& world, int from);

}  // namespace lockstep
