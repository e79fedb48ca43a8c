// SPDX-License-Identifier: Apache-2.0
#include "lockstep/collective/operator_spans.h"

#include <ATen/SequenceNumber.h>
#include <ATen/record_function.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <array>
#include <mutex>
#include <optional>
#include <string_view>
#include <vector>

#include "lockstep/base/process/own_process.h"
#include "lockstep/observe/trace.h"

namespace lockstep {
namespace {

// The name of an operator, for the node that it made.
struct NodeName {
  uint64_t thread = 0;
  int64_t number = -1;
  trace::Name name;
};

std::mutex& nodes_mutex() {
  static auto* const mutex = new std::mutex;
  return *mutex;
}

// Call it with the mutex held.
NodeName& node_of(int64_t number) {
  static auto* const nodes = [] {
    hold_during_fork<std::mutex, nodes_mutex>();
    return new std::array<NodeName, 1 << 13>;  // those of one forward(): a later one replaces them
  }();
  return nodes->at(static_cast<size_t>(number) % nodes->size());
}

void name_nodes(uint64_t thread, uint64_t first, uint64_t last, const trace::Name& name) {
  const std::lock_guard lock(nodes_mutex());
  for (auto number = static_cast<int64_t>(first); number < static_cast<int64_t>(last); ++number)
    node_of(number) = {.thread = thread, .number = number, .name = name};
}

std::optional<trace::Name> name_of_node(uint64_t thread, int64_t number) {
  const std::lock_guard lock(nodes_mutex());
  const NodeName& node = node_of(number);
  return node.thread == thread && node.number == number ? std::optional(node.name) : std::nullopt;
}

// The operator that this thread is in: one that was not called by another one.
struct CurrentOperator {
  int64_t begin = 0;   // 0: none
  int inside = 0;      // operators that it has called, that torch has told of and that have not ended
  bool alone = false;  // torch tells of none that it calls
  uint64_t first_node = 0;
  trace::Name name;
};

constinit thread_local CurrentOperator current;  // without a destructor: global objects may use operators at their end

std::string_view without_namespace(std::string_view name) {
  const size_t colons = name.rfind("::");
  return colons == std::string_view::npos ? name : name.substr(colons + 2);
}

// A name longer than a span's keeps its end, which tells modules apart.
trace::Name end_of(std::string_view name) {
  return name.substr(name.size() - std::min(name.size(), trace::Name().size() - 1));
}

bool is_within_another() {
  if (current.begin == 0) return false;
  ++current.inside;
  return true;
}

// Turns off torch's reports about what the operator calls: they would cost more than all the rest. torch's profiler wants them.
void begin_operator(const trace::Name& name) {
  current = {.begin = trace::now(),
             .alone = !at::hasThreadLocalCallbacks(),
             .first_node = at::sequence_number::peek(),
             .name = name};
  if (current.alone) at::enableRecordFunction(false);
}

// Returns it, if this is its end: operators of a thread end in the reverse order of their beginnings.
std::optional<CurrentOperator> end_operator() {
  if (current.begin == 0 || current.inside-- > 0) return {};
  if (current.alone) at::enableRecordFunction(true);
  return std::exchange(current, {});
}

void write(const CurrentOperator& ended, trace::Kind kind) {
  trace::write({.name = ended.name, .kind = kind, .begin = ended.begin});
}

std::unique_ptr<at::ObserverContext> begin_forward(const at::RecordFunction& function) {
  if (is_within_another() || !c10::GradMode::is_enabled() || !trace::records()) return {};
  std::string_view name = without_namespace(function.name());
  for (const c10::IValue& input : function.inputs())
    if (input.isTensor() && input.toTensor().defined() && !input.toTensor().name().empty()) {
      name = input.toTensor().name();
      break;
    }
  begin_operator(end_of(name));
  return {};
}

// The nodes of this thread are numbered one after the other. An operator that has made none is not autograd's.
void end_forward(const at::RecordFunction&, at::ObserverContext*) {
  const auto ended = end_operator();
  const uint64_t last = at::sequence_number::peek();
  if (!ended || ended->first_node == last) return;
  name_nodes(at::RecordFunction::currentThreadId(), ended->first_node, last, ended->name);
  write(*ended, trace::Kind::kForward);
}

// A node without a number adds to a .grad, and has no name here.
std::unique_ptr<at::ObserverContext> begin_node(const at::RecordFunction& function) {
  if (is_within_another() || !trace::records()) return {};
  trace::Name name;
  if (const int64_t number = function.seqNr(); number >= 0)
    name = name_of_node(function.forwardThreadId(), number).value_or(end_of(function.name()));
  begin_operator(name);
  return {};
}

void end_node(const at::RecordFunction&, at::ObserverContext*) {
  if (const auto ended = end_operator(); ended && ended->name.front() != 0) write(*ended, trace::Kind::kBackward);
}

// Torch tells of operators while something is recorded. One thread.
void show_operators(bool on) {
  static std::vector<at::CallbackHandle> callbacks;
  static bool shows = false;
  if (on == std::exchange(shows, on)) return;
  for (const at::CallbackHandle callback : callbacks)
    on ? at::reenableCallback(callback) : at::disableCallback(callback);
  if (!callbacks.empty()) return;
  callbacks = {
      at::addGlobalCallback(
          at::RecordFunctionCallback(begin_forward, end_forward).needsInputs(true).scopes({at::RecordScope::FUNCTION})),
      at::addGlobalCallback(
          at::RecordFunctionCallback(begin_node, end_node).scopes({at::RecordScope::BACKWARD_FUNCTION}))};
}

[[maybe_unused]] const bool is_registered = (trace::record_more = &show_operators, true);

}  // namespace

void name_parameter(const at::Tensor& parameter, const std::string& path) {
  torch::autograd::impl::set_name(parameter, path.substr(0, std::min(path.size(), path.rfind('.'))));
}

}  // namespace lockstep
