// SPDX-License-Identifier: Apache-2.0
// model/operator_handler.h: sees every operator that a thread calls, before torch does.
//
// Owns:    nothing
// Threads: a handler is active on the thread that made the guard, one at a time
// Ranks:   no communication
//
// Side effect on the whole process: the first guard registers a fallback for torch's dispatch key DeferredInit, which
// nothing else in libtorch uses. It is active only on threads that have a guard.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

namespace lockstep {

class OperatorHandler {
 public:
  using Stack = torch::jit::Stack;  // the arguments, then the results, are at its end

  virtual ~OperatorHandler() = default;

  // Takes the place of the operator. Its own calls, such as op.callBoxed(stack), go to torch.
  virtual void call(const c10::OperatorHandle& op, Stack& stack) = 0;
};

class OperatorHandlerGuard {
 public:
  explicit OperatorHandlerGuard(OperatorHandler& handler);
  ~OperatorHandlerGuard();
  OperatorHandlerGuard& operator=(OperatorHandlerGuard&&) = delete;

 private:
  c10::impl::IncludeDispatchKeyGuard include_;
};

}  // namespace lockstep
