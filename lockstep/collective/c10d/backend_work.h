// SPDX-License-Identifier: Apache-2.0
// collective/c10d/backend_work.h: what the shared-memory backend returns for each call: a c10d::Work.
//
// Flow:    backend.cc makes it -> the thread that makes the call completes it -> the caller or its future waits
// Owns:    tensors of the call; those of a message are held by the backend too, as nobody need keep its Work
// Threads: any
// Ranks:   no communication
#pragma once

#include <ATen/core/ivalue.h>
#include <ATen/core/jit_type.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <exception>
#include <functional>
#include <mutex>
#include <utility>

#include "lockstep/collective/c10d/backend_tensors.h"
#include "lockstep/collective/future.h"

namespace lockstep::backend {

std::exception_ptr failure_of(const std::function<void()>& body);  // what it threw, or nothing

class CollectiveWork final : public c10d::Work {
 public:
  CollectiveWork(int rank, c10d::OpType type, Tensors results)
      : c10d::Work(rank, type),
        results_(std::move(results)),
        future_(c10::make_intrusive<c10::ivalue::Future>(c10::ListType::ofTensors())) {}

  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }
  std::vector<Tensor> result() override { return results_; }

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

// A send or receive. Its tensor is complete once wait(), or isCompleted(), has said so.
class MessageWork final : public c10d::Work {
 public:
  MessageWork(int rank, c10d::OpType type, FlatTensors piece, FuturePtr future)
      : c10d::Work(rank, type), piece_(std::move(piece)), future_(std::move(future)) {}

  bool isCompleted() override {
    if (future_->done()) settle();
    return c10d::Work::isCompleted();
  }
  bool isSuccess() const override { return future_->done() && c10d::Work::isSuccess(); }
  int sourceRank() const override { return future_->source(); }
  std::vector<Tensor> result() override { return {piece_.first()}; }

  bool wait(std::chrono::milliseconds timeout) override {
    if (timeout == kNoTimeout)
      future_->wait();
    else
      future_->wait(Deadline::after(timeout));
    settle();
    return c10d::Work::wait(kNoTimeout);
  }

 private:
  void settle() {
    std::call_once(settled_, [this] {
      finish(failure_of([this] {
        future_->wait();
        if (opType_ != c10d::OpType::SEND) piece_.copy_out();
      }));
    });
  }

  FlatTensors piece_;
  FuturePtr future_;
  std::once_flag settled_;
};

}  // namespace lockstep::backend
