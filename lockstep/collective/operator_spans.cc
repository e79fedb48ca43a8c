// SPDX-License-Identifier: Apache-2.0
#include "lockstep/collective/operator_spans.h"

#include <ATen/SequenceNumber.h>
#include <ATen/record_function.h>
#include <c10/core/GradMode.h>

#include <array>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <unordered_map>

#include "lockstep/base/own_process.h"
#include "lockstep/base/trace.h"

namespace lockstep {
namespace {

using WeakTensor = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;

// A weak pointer keeps the address from being used again, so that no other tensor gets the name.
struct NamedParameter {
  WeakTensor tensor;
  std::string module;
};

// What an operator is called, for the node that it made.
struct NodeName {
  std::uint64_t thread = 0;
  std::int64_t number = -1;
  trace::Name name{};
};

std::mutex& names_mutex() {
  static auto* const mutex = new std::mutex;
  return *mutex;
}

class OperatorNames {
 public:
  static OperatorNames& instance() {
    static auto* const names = new OperatorNames;  // autograd's threads may outlive static objects
    return *names;
  }

  OperatorNames() { hold_during_fork<std::mutex, names_mutex>(); }

  void name_parameter(const at::Tensor& parameter, std::string_view path) {
    const std::lock_guard lock(names_mutex());
    if (parameters_.size() >= forget_at_) forget_expired();
    const std::size_t dot = path.rfind('.');
    const WeakTensor weak(parameter.getIntrusivePtr());
    parameters_.insert_or_assign(parameter.unsafeGetTensorImpl(),
                                 NamedParameter{weak, std::string(path.substr(0, std::min(dot, path.size())))});
  }

  std::string module_of(c10::ArrayRef<const c10::IValue> inputs) {
    const std::lock_guard lock(names_mutex());
    for (const c10::IValue& input : inputs) {
      if (!input.isTensor()) continue;
      const auto found = parameters_.find(input.unsafeToTensorImpl());
      if (found != parameters_.end()) return found->second.module;
    }
    return {};
  }

  void name_node(std::uint64_t thread, std::int64_t number, const std::string& name) {
    const std::lock_guard lock(names_mutex());
    NodeName& node = node_of(number);
    node = {.thread = thread, .number = number};
    name.copy(node.name.data(), node.name.size() - 1);
  }

  std::string name_of_node(std::uint64_t thread, std::int64_t number) {
    const std::lock_guard lock(names_mutex());
    const NodeName& node = node_of(number);
    return node.thread == thread && node.number == number ? node.name.data() : "";
  }

 private:
  NodeName& node_of(std::int64_t number) { return nodes_[static_cast<std::size_t>(number) % nodes_.size()]; }

  void forget_expired() {
    std::erase_if(parameters_, [](const auto& entry) { return entry.second.tensor.expired(); });
    forget_at_ = 2 * parameters_.size() + kParameters;
  }

  static constexpr std::size_t kParameters = 1024;
  std::unordered_map<const c10::TensorImpl*, NamedParameter> parameters_;
  std::size_t forget_at_ = kParameters;
  std::array<NodeName, 1 << 13> nodes_;  // those of one forward(): a later one replaces them
};

// An operator that was not called by another one.
struct OperatorContext final : at::ObserverContext {
  std::int64_t begin = 0;
  std::uint64_t first_node = 0;
  std::string name;
};

thread_local bool in_operator = false;

std::string_view without_namespace(std::string_view name) {
  const std::size_t colons = name.rfind("::");
  return colons == std::string_view::npos ? name : name.substr(colons + 2);
}

// A name longer than a span's keeps its end, which tells modules apart.
std::string end_of(std::string name) {
  const std::size_t most = trace::Name().size() - 1;
  return name.size() <= most ? name : name.substr(name.size() - most);
}

std::unique_ptr<OperatorContext> begin_operator() {
  if (in_operator || !trace::recording.load(std::memory_order_relaxed)) return nullptr;
  in_operator = true;
  auto context = std::make_unique<OperatorContext>();
  context->begin = trace::now();
  return context;
}

std::unique_ptr<at::ObserverContext> begin_forward(const at::RecordFunction& function) {
  if (!c10::GradMode::is_enabled()) return nullptr;
  auto context = begin_operator();
  if (context == nullptr) return nullptr;
  context->name = end_of(OperatorNames::instance().module_of(function.inputs()));
  if (context->name.empty()) context->name = without_namespace(function.name());
  context->first_node = at::sequence_number::peek();
  return context;
}

// The nodes of this thread are numbered one after the other. An operator that has made none is not autograd's.
void end_forward(const at::RecordFunction&, at::ObserverContext* made) {
  const auto* const context = static_cast<OperatorContext*>(made);
  if (context == nullptr) return;
  in_operator = false;
  const std::uint64_t last = at::sequence_number::peek();
  if (last == context->first_node) return;
  const std::uint64_t thread = at::RecordFunction::currentThreadId();
  for (std::uint64_t node = context->first_node; node < last; ++node)
    OperatorNames::instance().name_node(thread, static_cast<std::int64_t>(node), context->name);
  trace::write(context->begin, {.name = context->name, .kind = trace::Kind::kForward});
}

std::unique_ptr<at::ObserverContext> begin_node(const at::RecordFunction& function) {
  if (function.seqNr() < 0) return nullptr;  // adds to a .grad
  auto context = begin_operator();
  if (context == nullptr) return nullptr;
  context->name = OperatorNames::instance().name_of_node(function.forwardThreadId(), function.seqNr());
  if (context->name.empty()) context->name = function.name();
  return context;
}

void end_node(const at::RecordFunction&, at::ObserverContext* made) {
  const auto* const context = static_cast<OperatorContext*>(made);
  if (context == nullptr) return;
  in_operator = false;
  trace::write(context->begin, {.name = context->name, .kind = trace::Kind::kBackward});
}

}  // namespace

void name_parameter(const at::Tensor& parameter, const std::string& path) {
  OperatorNames::instance().name_parameter(parameter, path);
}

void show_operators() {
  [[maybe_unused]] static const bool once = [] {
    at::addGlobalCallback(
        at::RecordFunctionCallback(begin_forward, end_forward).needsInputs(true).scopes({at::RecordScope::FUNCTION}));
    at::addGlobalCallback(
        at::RecordFunctionCallback(begin_node, end_node).scopes({at::RecordScope::BACKWARD_FUNCTION}));
    return true;
  }();
}

}  // namespace lockstep
