// SPDX-License-Identifier: Apache-2.0
// base/torch_version.h: what differs between the releases of torch that lockstep is built against, 2.11 to 2.15, and nothing
// else. The only file of base/ that includes torch. docs/design/torch-versions.md lists what lockstep uses beyond torch's
// public API.
//
// Threads: types
#pragma once

#include <torch/csrc/autograd/edge.h>

#include <memory>
#include <type_traits>
#include <utility>

namespace lockstep {

// A node of autograd's graph: a std::shared_ptr until torch 2.12, a c10::intrusive_ptr since 2.13.
using NodePtr = decltype(torch::autograd::Edge::function);

// A new node, of a class that is derived from torch's.
template <class Node, class... Arguments>
NodePtr make_node(Arguments&&... arguments) {
  if constexpr (std::is_same_v<NodePtr, std::shared_ptr<torch::autograd::Node>>)
    return std::make_shared<Node>(std::forward<Arguments>(arguments)...);
  else
    return c10::make_intrusive<Node>(std::forward<Arguments>(arguments)...);
}

}  // namespace lockstep
