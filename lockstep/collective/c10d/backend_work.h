// SPDX-License-Identifier: Apache-2.0
// collective/c10d/backend_work.h: what the shared-memory backend returns for each call: a c10d::Work.
//
// Flow:    backend.cc makes it -> the thread that makes the call completes it -> the caller or its future waits
// Owns:    tensors of the call; those of a message are held by the transport too, as nobody need keep its Work
// Threads: any
// Ranks:   no communication
#pragma once

#include <ATen/core/ivalue.h>
#include <ATen/core/jit_type.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <exception>
#include <mutex>
#include <utility>

#include "lockstep/collective/calls/future.h"
#include "lockstep/collective/calls/tensor_call.h"
#include "lockstep/collective/traced_messages.h"

namespace lockstep::backend {

// Returns what `body` threw, or null.
template <class Body>
std::exception_ptr failure_of(const Body& body) {
  try {
    body();
  } catch (...) {
    return std::current_exception();
  }
  return nullptr;
}

class CollectiveWork final : public c10d::Work {
 public:
  CollectiveWork(int rank, c10d::OpType type, Tensors results)
      : c10d::Work(rank, type),
        results_(std::move(results)),
        future_(c10::make_intrusive<c10::ivalue::Future>(c10::ListType::ofTensors())) {}

  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }
  Tensors result() override { return results_; }

  // The future first, as Gloo: who has waited finds it done, and its callbacks. One that throws must not leave others
  // waiting: unless the call itself failed, its error is the Work's.
  void complete(const std::exception_ptr& error) {
    const std::exception_ptr of_callback = failure_of([&] {
      if (error)
        future_->setError(error);
      else
        future_->markCompleted(c10::IValue(results_));
    });
    finish(error ? error : of_callback);
  }

 private:
  Tensors results_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

// A send or receive of one tensor, which is complete once wait(), or isCompleted(), has said so.
class MessageWork final : public c10d::Work {
 public:
  MessageWork(int rank, c10d::OpType type, Tensors tensors, TensorCall call, TracedMessage traced, FuturePtr future)
      : c10d::Work(rank, type),
        tensors_(std::move(tensors)),
        call_(std::move(call)),
        traced_(std::move(traced)),
        future_(std::move(future)) {}

  bool isCompleted() override {
    if (future_->done()) settle(trace::now_if_recording());
    return c10d::Work::isCompleted();
  }
  bool isSuccess() const override { return future_->done() && c10d::Work::isSuccess(); }
  int sourceRank() const override { return future_->source(); }
  Tensors result() override { return tensors_; }

  bool wait(milliseconds timeout) override {
    const std::int64_t began = trace::now_if_recording();
    future_->wait(timeout == kNoTimeout ? std::nullopt : std::optional(Deadline::after(timeout)));
    settle(began);
    return c10d::Work::wait(kNoTimeout);
  }

 private:
  void settle(std::int64_t began) {
    std::call_once(settled_, [&] {
      finish(failure_of([&] {
        future_->wait();
        call_.finish();
        if (call_.operation == Operation::kReceive) traced_.write(began, future_->source());
      }));
    });
  }

  Tensors tensors_;
  TensorCall call_;
  TracedMessage traced_;
  FuturePtr future_;
  std::once_flag settled_;
};

}  // namespace lockstep::backend
