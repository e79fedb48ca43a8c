// SPDX-License-Identifier: Apache-2.0
// strategy/pipeline/tensor_messages.h: lists of tensors from one rank to another, whose shapes the receiver does not
// know.
//
// A message is a header of fixed length (how many; of each dtype, shape, whether it requires gradients, and memory
// format), then each tensor. An undefined tensor stays one.
//
// Flow:    one rank's Tensors -> World's messages -> another's
// Owns:    a sender what is under way
// Threads: as World
// Ranks:   one sends, one receives, in the same order per tag
#pragma once

#include <cstdint>
#include <deque>

#include "lockstep/optimizer.h"
#include "lockstep/task.h"
#include "lockstep/world.h"

namespace lockstep {

class TensorSender {
 public:
  TensorSender(World world, int to, int tag) : world_(std::move(world)), to_(to), tag_(tag) {}

  // Does not block: two ranks may send to each other at the same time. Throws UsageError: shapes that no header holds;
  // PeerLost, of an earlier message.
  void send(const Tensors& tensors);

  void forget_received();  // frees what has been received. Throws PeerLost
  void finish();           // blocks until all that was sent has been received. Throws PeerLost

 private:
  World world_;
  int to_;
  int tag_;
  std::deque<Work> under_way_;
};

// Blocks until they are there. Throws PeerLost; MismatchError: a header that describes no tensors, or more than this
// machine's memory.
Tensors receive_tensors(const World& world, int from, int tag);

// Tells whether a received number stands for a dtype that tensors of a message can have.
bool is_dtype(int64_t number);

// Text as a tensor, uint8 (length), and back.
Tensor bytes_of_text(const std::string& text);
std::string text_in(const Tensor& bytes);

// An optimizer's state of one parameter as a message: names and values in turn, a name as its bytes.
Tensors message_of(const Optimizer::StateTensors& state);
Optimizer::StateTensors state_in(const Tensors& message);  // throws MismatchError

}  // namespace lockstep
