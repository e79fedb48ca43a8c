// SPDX-License-Identifier: Apache-2.0
// strategy/pipeline/links.h: what carries activations and gradients between neighbouring stages: a channel between two
// devices of a process, or messages between two ranks.
//
// Flow:    stage.h on one device -> a link -> stage.h on the next
// Owns:    tensors under way
// Threads: each end belongs to the thread of its stage
// Ranks:   both ends make matching calls in the same order
#pragma once

#include <functional>
#include <optional>

#include "lockstep/devices.h"
#include "lockstep/task.h"
#include "lockstep/world.h"

namespace lockstep {

// A stage's end of the connection with a neighbour. Activations go forward: leaves, which require gradients where the
// sender's do. A gradient for each of them comes back, undefined where there is none. All throw PeerLost.
struct StageLink {
  std::function<void(Tensors)> send;     // may block until there is room
  std::function<Tensors()> receive;      // blocks until they are there
  std::function<void()> finish = [] {};  // blocks until the neighbour has received everything
};

struct StageLinks {
  std::optional<StageLink> before;  // none for the first stage
  std::optional<StageLink> behind;  // none for the last stage
};

// Brings tensors of another stage to this one's device, as leaves, which require gradients as before. Tensors on the
// host stay there.
Tensors received_on(torch::Device device, const Tensors& tensors);

// Between devices that are threads: device i has stage i % stages. The result gives each device its links, which are
// valid as long as it is. capacity: messages in each direction.
std::function<StageLinks(Device&)> thread_links(int devices, int stages, size_t capacity);

// Between ranks: rank i of both worlds has stage i. Activations go over `forward`, gradients over `back`.
StageLinks message_links(const World& forward, const World& back);

}  // namespace lockstep
