// SPDX-License-Identifier: Apache-2.0
// checkpoint() runs the function with a graph, looks in it for the leaves (parameters) that it leads to, and drops it:
// the activations go with it. What remains is one node of autograd from the inputs and these leaves to the outputs. Its
// backward runs the function again, on detached inputs, and asks autograd for the gradients of both. So autograd sees
// every parameter that takes part: hooks, unused parameters and torch::autograd::grad work as without it.
#include "lockstep/activation_checkpoint.h"

#include <ATen/Context.h>
#include <ATen/SequenceNumber.h>
#include <c10/util/ScopeExit.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>

#include <algorithm>
#include <unordered_set>
#include <utility>

#include "lockstep/base/text.h"
#include "lockstep/error.h"
#include "lockstep/strategy/autograd.h"
#include "lockstep/strategy/devices/thread_generator.h"

namespace lockstep {
namespace {

using ListFunction = std::function<Tensors(const Tensors&)>;
using torch::autograd::AutogradContext;
using torch::autograd::Node;

// The states of the generators that a function may draw from.
class RandomStates {
 public:
  explicit RandomStates(const Tensors& inputs) {
    add(ThreadGenerator::current().value_or(at::globalContext().defaultGenerator(torch::kCPU)));
    for (const Tensor& input : inputs)
      if (input.defined() && input.is_cuda()) add(at::globalContext().defaultGenerator(input.device()));
  }

  // Exchanges them for those that the generators have.
  void swap() {
    for (auto& [generator, state] : states_) {
      const std::lock_guard lock(generator.mutex());
      Tensor now = generator.get_state();
      generator.set_state(std::exchange(state, now));
    }
  }

 private:
  void add(at::Generator generator) {
    for (const auto& [known, state] : states_)
      if (known == generator) return;
    const std::lock_guard lock(generator.mutex());
    states_.emplace_back(generator, generator.get_state());
  }
  std::vector<std::pair<at::Generator, Tensor>> states_;
};

struct CheckpointedCall : torch::CustomClassHolder {
  CheckpointedCall(ListFunction given, const Tensors& of) : function(std::move(given)), inputs(of.size()), random(of) {
    autocast.caches = false;  // copies that it keeps would lead out of the function
  }

  Tensors run(const Tensors& given) const {
    const AutocastGuard guard(autocast);
    return function(given);
  }

  // Once more, with random numbers and settings as the first time.
  Tensors run_again(const Tensors& given) const {
    RandomStates states = random;
    states.swap();
    const auto swap_back = c10::make_scope_exit([&] { states.swap(); });
    return run(given);
  }

  ListFunction function;
  size_t inputs;
  RandomStates random;
  AutocastSetting autocast = AutocastSetting::now();
  Tensors outputs;  // of forward, until it returns
};

UsageError changed(const std::string& what) {
  return UsageError({.what = concat("checkpoint(): the function returned ", what, " when backward ran it again"),
                     .likely = "a function that depends on more than its inputs, parameters and random numbers",
                     .next = "make it return the same for the same inputs, or leave out checkpoint()"});
}

bool needs_gradient(const Tensor& tensor) { return tensor.defined() && tensor.requires_grad(); }

void require_same(const Tensors& outputs, const Tensors& gradients) {
  if (outputs.size() != gradients.size())
    throw changed(concat(outputs.size(), " tensors in place of ", gradients.size()));
  for (size_t i = 0; i < outputs.size(); ++i)
    if (gradients[i].defined() && (!outputs[i].defined() || outputs[i].sizes() != gradients[i].sizes()))
      throw changed(concat("another shape for output ", i));
}

class Recomputed : public torch::autograd::Function<Recomputed> {
 public:
  // variables: the inputs, then the leaves.
  static Tensors forward(AutogradContext* context, const c10::intrusive_ptr<CheckpointedCall>& call,
                         const at::TensorList& variables) {
    context->save_for_backward(variables.vec());
    context->saved_data["call"] = c10::IValue::make_capsule(call);
    context->set_materialize_grads(false);
    Tensors outputs, constant;
    for (const Tensor& output : std::exchange(call->outputs, {})) {
      outputs.push_back(output.detach());
      if (!output.requires_grad()) constant.push_back(outputs.back());
    }
    context->mark_non_differentiable(constant);
    return outputs;
  }

  static Tensors backward(AutogradContext* context, const Tensors& gradients) {
    if (at::GradMode::is_enabled())
      throw UsageError({.what = "create_graph through checkpoint()",
                        .next = "leave out checkpoint() where gradients of gradients are needed"});
    const auto call = c10::dynamic_intrusive_pointer_cast<CheckpointedCall>(context->saved_data["call"].toCapsule());
    Tensors variables = context->get_saved_variables();
    const auto inputs_end = variables.begin() + static_cast<ptrdiff_t>(call->inputs);
    const Tensors inputs = as_leaves({variables.begin(), inputs_end});
    std::ranges::copy(inputs, variables.begin());
    const at::AutoGradMode with_graph(true);
    const Tensors outputs = call->run_again(inputs);
    require_same(outputs, gradients);
    return gradients_of(outputs, gradients, variables);
  }

 private:
  // The first one is that of the CheckpointedCall, which has none.
  static Tensors gradients_of(const Tensors& outputs, const Tensors& gradients, const Tensors& variables) {
    Tensors roots, seeds, sources;
    for (size_t i = 0; i < outputs.size(); ++i)
      if (gradients[i].defined() && outputs[i].requires_grad()) {
        roots.push_back(outputs[i]);
        seeds.push_back(gradients[i]);
      }
    for (const Tensor& variable : variables)
      if (needs_gradient(variable)) sources.push_back(variable);
    Tensors found(sources.size());
    if (!roots.empty())
      found = torch::autograd::grad(roots, sources, seeds, /*retain_graph=*/false, /*create_graph=*/false,
                                    /*allow_unused=*/true);
    Tensors all(1 + variables.size());
    auto next = found.begin();
    for (size_t i = 0; i < variables.size(); ++i)
      if (needs_gradient(variables[i])) all[1 + i] = std::move(*next++);
    return all;
  }
};

// The leaves that the graph of `outputs` leads to. It may lead out of the function only through the inputs, which have
// no graph in it, so every node but theirs is younger than `begin`.
Tensors leaves_of(const Tensors& outputs, uint64_t begin, const Tensors& inputs) {
  Tensors leaves;
  std::unordered_set<const Node*> seen;
  std::vector<torch::autograd::Edge> held;  // a leaf's node lives as long as somebody holds it
  const auto node_of = [&](const Tensor& tensor) {
    return held.emplace_back(torch::autograd::impl::gradient_edge(tensor)).function.get();
  };
  for (const Tensor& input : inputs)
    if (needs_gradient(input)) seen.insert(node_of(input));
  std::vector<Node*> to_do;
  const auto visit = [&](Node* node) {
    if (node != nullptr && seen.insert(node).second) to_do.push_back(node);
  };
  for (const Tensor& output : outputs)
    if (output.requires_grad()) visit(node_of(output));
  while (!to_do.empty()) {
    Node* node = to_do.back();
    to_do.pop_back();
    if (const auto* leaf = dynamic_cast<torch::autograd::AccumulateGrad*>(node)) {
      leaves.push_back(leaf->variable);
      continue;
    }
    if (node->sequence_nr() < begin)
      throw UsageError(
          {.what = concat("checkpoint(): the function uses a tensor that was computed outside, by ", node->name()),
           .likely = "a lambda that captures an activation",
           .next = "make it one of the inputs"});
    for (const auto& edge : node->next_edges()) visit(edge.function.get());
  }
  return leaves;
}

std::vector<uint32_t> versions_of(const Tensors& tensors) {
  std::vector<uint32_t> versions;
  for (const Tensor& tensor : tensors)
    versions.push_back(tensor.defined() && !tensor.is_inference() ? tensor._version() : 0);
  return versions;
}

void require_usable(const Tensors& outputs, const Tensors& inputs, const std::vector<uint32_t>& versions) {
  for (size_t i = 0; i < outputs.size(); ++i)
    if (!outputs[i].defined())
      throw UsageError({.what = concat("checkpoint(): output ", i, " of the function is undefined"),
                        .next = "return defined tensors only"});
  const auto after = versions_of(inputs);
  for (size_t i = 0; i < inputs.size(); ++i)
    if (after[i] != versions[i])
      throw UsageError({.what = concat("checkpoint(): the function changes input ", i, " in place"),
                        .likely = "an operation such as relu_() on an input",
                        .next = "use the operation that returns a new tensor"});
}

}  // namespace

Tensors checkpoint(const ListFunction& function, const Tensors& inputs) {
  if (!at::GradMode::is_enabled()) return function(inputs);
  const auto call = c10::make_intrusive<CheckpointedCall>(function, inputs);
  const Tensors given = as_leaves(inputs);  // at which the graph ends
  const auto versions = versions_of(inputs);
  const uint64_t begin = at::sequence_number::peek();
  call->outputs = call->run(given);
  require_usable(call->outputs, inputs, versions);
  const Tensors leaves = leaves_of(call->outputs, begin, given);
  Tensors variables = inputs;
  variables.insert(variables.end(), leaves.begin(), leaves.end());
  return Recomputed::apply(call, at::TensorList(variables));  // in a vector autograd would not look for tensors
}

Tensor checkpoint(const std::function<Tensor(const Tensor&)>& function, const Tensor& input) {
  const auto one = [function](const Tensors& inputs) { return Tensors{function(inputs[0])}; };
  return checkpoint(ListFunction(one), Tensors{input}).front();
}

}  // namespace lockstep
