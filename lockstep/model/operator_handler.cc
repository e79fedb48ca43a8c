// SPDX-License-Identifier: Apache-2.0
#include "lockstep/model/operator_handler.h"

#include <torch/library.h>

namespace lockstep {
namespace {

thread_local OperatorHandler* active_handler = nullptr;

void hand_to_handler(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  const c10::impl::ExcludeDispatchKeyGuard guard(c10::DispatchKey::DeferredInit);
  active_handler != nullptr ? active_handler->call(op, *stack) : op.callBoxed(*stack);
}

c10::DispatchKey registered_key() {
  [[gnu::used]] static const auto* const library = [] {  // used: leak checkers look for it
    auto* made = new torch::Library(torch::Library::IMPL, "_", c10::DispatchKey::DeferredInit, __FILE__, __LINE__);
    made->fallback(torch::CppFunction::makeFromBoxedFunction<&hand_to_handler>());
    return made;  // registered as long as the process runs
  }();
  return c10::DispatchKey::DeferredInit;
}

}  // namespace

OperatorHandlerGuard::OperatorHandlerGuard(OperatorHandler& handler) : include_(registered_key()) {
  active_handler = &handler;
}

OperatorHandlerGuard::~OperatorHandlerGuard() { active_handler = nullptr; }

}  // namespace lockstep
