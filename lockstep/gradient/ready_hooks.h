// SPDX-License-Identifier: Apache-2.0
// gradient/ready_hooks.h: calls back once autograd has accumulated a parameter's gradient.
//
// Owns:    its hooks, until it is destroyed
// Threads: add() and clear() from one thread, while no backward() runs; autograd calls back on its own threads
// Ranks:   no communication
#pragma once

#include <torch/types.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

namespace torch::autograd {
struct Node;
}

namespace lockstep {

class ReadyHooks {
 public:
  ReadyHooks() = default;
  ~ReadyHooks() { clear(); }
  ReadyHooks(const ReadyHooks&) = delete;
  ReadyHooks& operator=(const ReadyHooks&) = delete;

  // parameter: a leaf that requires a gradient. `ready` may run several times in a backward() that contains another
  // one. What it throws comes out of backward().
  void add(const torch::Tensor& parameter, std::function<void()> ready);

  void clear();

 private:
  std::vector<std::pair<std::shared_ptr<torch::autograd::Node>, std::uintptr_t>> hooks_;  // accumulator, key
};

}  // namespace lockstep
