// SPDX-License-Identifier: Apache-2.0
#include "lockstep/gradient/unused_parameters.h"

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include <unordered_set>
#include <vector>

namespace lockstep {
namespace {

using torch::autograd::Node;

// Depth first, without recursion: a graph may be deeper than the stack.
std::unordered_set<const Node*> nodes_behind(const torch::Tensor& loss) {
  std::unordered_set<const Node*> seen;
  std::vector<const Node*> next;
  const auto visit = [&](const Node* node) {
    if (node != nullptr && seen.insert(node).second) next.push_back(node);
  };
  if (loss.defined()) visit(torch::autograd::impl::gradient_edge(loss).function.get());
  while (!next.empty()) {
    const Node* node = next.back();
    next.pop_back();
    for (const auto& edge : node->next_edges()) visit(edge.function.get());
  }
  return seen;
}

}  // namespace

std::function<bool(const torch::Tensor&)> reached_by(const torch::Tensor& loss) {
  return [nodes = nodes_behind(loss)](const torch::Tensor& parameter) {
    return nodes.contains(torch::autograd::impl::try_get_grad_accumulator(parameter).get());
  };
}

std::function<bool(const torch::Tensor&)> reached_by_this_backward() {
  return [nodes = torch::autograd::get_current_graph_task_nodes_in_graph()](const torch::Tensor& parameter) {
    return nodes->contains(torch::autograd::impl::try_get_grad_accumulator(parameter).get());
  };
}

}  // namespace lockstep
