// SPDX-License-Identifier: Apache-2.0
// checkpoint() runs the function with a graph, looks in it for the leaves (parameters) that it leads to, and drops it: the
// activations go with it. What remains is one node of autograd from the inputs and these leaves to the outputs. Its
// backward runs the function again, on detached inputs, and asks autograd for the gradients of both. So autograd sees
// every parameter that takes part: hooks, unused parameters and torch::autograd::grad work as without it.
#include "lockstep/activation_checkpoint.h"

#include <ATen/Context.h>
#include <ATen/SequenceNumber.h>
#include <ATen/autocast_mode.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>

#include <array>
#include <set>
#include <unordered_set>
#include <utility>

#include "lockstep/base/text.h"
#include "lockstep/base/to_size.h"
#include "lockstep/error.h"
#include "lockstep/strategy/devices/thread_generator.h"

namespace lockstep {
namespace {

using TensorList = std::vector<torch::Tensor>;
using ListFunction = std::function<TensorList(const TensorList&)>;
using torch::autograd::AutogradContext;
using torch::autograd::Node;

// The generators that the function may draw from, and where they are.
class GeneratorStates {
 public:
  explicit GeneratorStates(const TensorList& inputs) {
    note(ThreadGenerator::current().value_or(at::globalContext().defaultGenerator(torch::kCPU)));
    std::set<c10::DeviceIndex> noted;
    for (const torch::Tensor& input : inputs)
      if (input.defined() && input.is_cuda() && noted.insert(input.device().index()).second)
        note(at::globalContext().defaultGenerator(input.device()));
  }

  void put_back() const {
    for (auto [generator, state] : states_) {
      const std::lock_guard lock(generator.mutex());
      generator.set_state(state);
    }
  }

  // The same generators, as they are now.
  GeneratorStates now() const {
    GeneratorStates now = *this;
    for (auto& [generator, state] : now.states_) {
      const std::lock_guard lock(generator.mutex());
      state = generator.get_state();
    }
    return now;
  }

 private:
  void note(at::Generator generator) {
    const std::lock_guard lock(generator.mutex());
    states_.emplace_back(generator, generator.get_state());
  }
  std::vector<std::pair<at::Generator, torch::Tensor>> states_;
};

// Autocast's setting of a thread.
struct AutocastSetting {
  static constexpr std::array kDevices = {at::kCPU, at::kCUDA};
  std::array<std::pair<bool, at::ScalarType>, 2> of_device;
  bool caches = true;

  static AutocastSetting now() {
    AutocastSetting setting;
    for (std::size_t i = 0; i < kDevices.size(); ++i)
      setting.of_device[i] = {at::autocast::is_autocast_enabled(kDevices[i]),
                              at::autocast::get_autocast_dtype(kDevices[i])};
    setting.caches = at::autocast::is_autocast_cache_enabled();
    return setting;
  }
  void set() const {
    for (std::size_t i = 0; i < kDevices.size(); ++i) {
      at::autocast::set_autocast_enabled(kDevices[i], of_device[i].first);
      at::autocast::set_autocast_dtype(kDevices[i], of_device[i].second);
    }
    at::autocast::set_autocast_cache_enabled(caches);
  }
};

// Runs `function`; afterwards autocast is as before. Copies that autocast keeps would lead out of the function.
TensorList run_with(AutocastSetting setting, const ListFunction& function, const TensorList& inputs) {
  struct Restores {
    AutocastSetting before = AutocastSetting::now();
    ~Restores() { before.set(); }
  } const restores;
  setting.caches = false;
  setting.set();
  return function(inputs);
}

struct CheckpointedCall {
  ListFunction function;
  std::size_t inputs = 0;
  GeneratorStates generators;
  AutocastSetting autocast;
  TensorList outputs{};  // of forward, until it returns

  // Once more, with random numbers and settings as the first time.
  TensorList run_again(const TensorList& given) const {
    struct Restores {
      GeneratorStates now;
      ~Restores() { now.put_back(); }
    } const restores{generators.now()};
    generators.put_back();
    return run_with(autocast, function, given);
  }
};

struct CheckpointedCallHolder : torch::CustomClassHolder {
  explicit CheckpointedCallHolder(std::shared_ptr<CheckpointedCall> given) : call(std::move(given)) {}
  std::shared_ptr<CheckpointedCall> call;
};

UsageError changed(const std::string& what) {
  return UsageError({.what = concat("checkpoint(): the function returned ", what, " when backward ran it again"),
                     .likely = "a function that depends on more than its inputs, parameters and random numbers",
                     .next = "make it return the same for the same inputs, or leave out checkpoint()"});
}

void require_same(const TensorList& outputs, const torch::autograd::variable_list& gradients) {
  if (outputs.size() != gradients.size())
    throw changed(concat(outputs.size(), " tensors in place of ", gradients.size()));
  for (std::size_t i = 0; i < outputs.size(); ++i)
    if (gradients[i].defined() && (!outputs[i].defined() || outputs[i].sizes() != gradients[i].sizes()))
      throw changed(concat("another shape for output ", i));
}

class Recomputed : public torch::autograd::Function<Recomputed> {
 public:
  // variables: the inputs, then the leaves.
  static torch::autograd::variable_list forward(AutogradContext* context, const std::shared_ptr<CheckpointedCall>& call,
                                                const at::TensorList& variables) {
    context->save_for_backward(variables.vec());
    context->saved_data["call"] = c10::IValue::make_capsule(c10::make_intrusive<CheckpointedCallHolder>(call));
    context->set_materialize_grads(false);
    TensorList outputs, constant;
    for (const torch::Tensor& output : std::exchange(call->outputs, {})) {
      outputs.push_back(output.detach());
      if (!output.requires_grad()) constant.push_back(outputs.back());
    }
    context->mark_non_differentiable(constant);
    return outputs;
  }

  static torch::autograd::variable_list backward(AutogradContext* context,
                                                 const torch::autograd::variable_list& gradients) {
    if (at::GradMode::is_enabled())
      throw UsageError({.what = "create_graph through checkpoint()",
                        .next = "leave out checkpoint() where gradients of gradients are needed"});
    const auto holder =
        c10::dynamic_intrusive_pointer_cast<CheckpointedCallHolder>(context->saved_data["call"].toCapsule());
    const CheckpointedCall& call = *holder->call;
    TensorList variables = context->get_saved_variables();
    for (std::size_t i = 0; i < call.inputs; ++i)
      if (variables[i].defined()) variables[i] = variables[i].detach().requires_grad_(variables[i].requires_grad());
    const at::AutoGradMode with_graph(true);
    const TensorList outputs =
        call.run_again({variables.begin(), variables.begin() + static_cast<std::ptrdiff_t>(call.inputs)});
    require_same(outputs, gradients);
    return gradients_of(outputs, gradients, variables);
  }

 private:
  // First that of the CheckpointedCall, which has none.
  static torch::autograd::variable_list gradients_of(const TensorList& outputs, const TensorList& gradients,
                                                     const TensorList& variables) {
    TensorList roots, seeds, sources;
    for (std::size_t i = 0; i < outputs.size(); ++i)
      if (gradients[i].defined() && outputs[i].requires_grad()) {
        roots.push_back(outputs[i]);
        seeds.push_back(gradients[i]);
      }
    for (const torch::Tensor& variable : variables)
      if (variable.defined() && variable.requires_grad()) sources.push_back(variable);
    torch::autograd::variable_list found;
    if (!roots.empty())
      found = torch::autograd::grad(roots, sources, seeds, /*retain_graph=*/false, /*create_graph=*/false,
                                    /*allow_unused=*/true);
    found.resize(sources.size());
    torch::autograd::variable_list all(1 + variables.size());
    std::size_t next = 0;
    for (std::size_t i = 0; i < variables.size(); ++i)
      if (variables[i].defined() && variables[i].requires_grad()) all[1 + i] = std::move(found[next++]);
    return all;
  }
};

// The leaves that the graph of `outputs` leads to. It may lead out of the function only through the inputs, which have no
// graph in it, so every node but theirs is younger than `begin`.
TensorList leaves_of(const TensorList& outputs, std::uint64_t begin, const TensorList& inputs) {
  TensorList leaves;
  std::unordered_set<const Node*> seen;
  for (const torch::Tensor& input : inputs)
    if (input.defined() && input.requires_grad())
      seen.insert(torch::autograd::impl::gradient_edge(input).function.get());
  std::vector<Node*> to_do;
  const auto visit = [&](Node* node) {
    if (node != nullptr && seen.insert(node).second) to_do.push_back(node);
  };
  for (const torch::Tensor& output : outputs)
    if (output.requires_grad()) visit(torch::autograd::impl::gradient_edge(output).function.get());
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

std::vector<std::uint32_t> versions_of(const TensorList& tensors) {
  std::vector<std::uint32_t> versions;
  for (const torch::Tensor& tensor : tensors)
    versions.push_back(tensor.defined() && !tensor.is_inference() ? tensor._version() : 0);
  return versions;
}

void require_usable(const TensorList& outputs, const TensorList& inputs, const std::vector<std::uint32_t>& versions) {
  for (std::size_t i = 0; i < outputs.size(); ++i)
    if (!outputs[i].defined())
      throw UsageError({.what = concat("checkpoint(): output ", i, " of the function is undefined"),
                        .next = "return defined tensors only"});
  const auto after = versions_of(inputs);
  for (std::size_t i = 0; i < inputs.size(); ++i)
    if (after[i] != versions[i])
      throw UsageError({.what = concat("checkpoint(): the function changes input ", i, " in place"),
                        .likely = "an operation such as relu_() on an input",
                        .next = "use the operation that returns a new tensor"});
}

}  // namespace

TensorList checkpoint(const ListFunction& function, const TensorList& inputs) {
  if (!at::GradMode::is_enabled()) return function(inputs);
  const auto call = std::make_shared<CheckpointedCall>(CheckpointedCall{.function = function,
                                                                        .inputs = inputs.size(),
                                                                        .generators = GeneratorStates(inputs),
                                                                        .autocast = AutocastSetting::now()});
  TensorList given;  // leaves, at which the graph ends
  for (const torch::Tensor& input : inputs)
    given.push_back(input.defined() ? input.detach().requires_grad_(input.requires_grad()) : input);
  const auto versions = versions_of(inputs);
  const std::uint64_t begin = at::sequence_number::peek();
  call->outputs = run_with(call->autocast, function, given);
  require_usable(call->outputs, inputs, versions);
  const TensorList leaves = leaves_of(call->outputs, begin, given);
  TensorList variables = inputs;
  variables.insert(variables.end(), leaves.begin(), leaves.end());
  return Recomputed::apply(call, at::TensorList(variables));  // in a vector autograd would not look for tensors
}

torch::Tensor checkpoint(const std::function<torch::Tensor(const torch::Tensor&)>& function,
                         const torch::Tensor& input) {
  const auto one = [function](const TensorList& inputs) { return TensorList{function(inputs[0])}; };
  return checkpoint(ListFunction(one), TensorList{input}).front();
}

}  // namespace lockstep
