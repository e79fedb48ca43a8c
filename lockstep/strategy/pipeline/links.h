// SPDX-License-Identifier: Apache-2.0
// strategy/pipeline/links.h: what carries activations and gradients between neighbouring stages: a channel between two
// devices of a process, or messages between two ranks.
//
// Flow:    stage.h on one device -> a link -> stage.h on the next
// Owns:    tensors under way
// Threads: each end belongs to the thread of its stage
// Ranks:   both ends make matching calls in the same order
#pragma once

#include <memory>

#include "lockstep/base/int_vector.h"
#include "lockstep/strategy/pipeline/channel.h"
#include "lockstep/task.h"
#include "lockstep/world.h"

namespace lockstep {

// A stage's end of the connection with a neighbour. Activations go forward: leaves, which require gradients where the
// sender's do. A gradient for each of them comes back, undefined where there is none.
class StageLink {
 public:
  virtual ~StageLink() = default;
  virtual void send(Tensors tensors) = 0;  // may block until there is room. Throws PeerLost
  virtual Tensors receive() = 0;           // blocks until they are there. Throws PeerLost
  virtual void finish() {}                 // blocks until the neighbour has received everything. Throws PeerLost
};

struct StageLinks {
  std::unique_ptr<StageLink> before;  // none for the first stage
  std::unique_ptr<StageLink> behind;  // none for the last stage
};

// Between devices that are threads: device i has stage i % stages.
class ThreadLinks {
 public:
  ThreadLinks(int devices, int stages, std::size_t capacity);  // capacity: messages in each direction
  StageLinks of(Device& device) const;

 private:
  struct Channels {
    explicit Channels(std::size_t capacity) : forward(capacity), backward(capacity) {}
    Channel<Tensors> forward;
    Channel<Tensors> backward;
  };
  class Link;

  IntVector<std::unique_ptr<Channels>> behind_;  // of each device; none behind a last stage
};

// Between ranks: rank i of `stages` has stage i.
StageLinks message_links(const World& stages);

}  // namespace lockstep
