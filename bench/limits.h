// SPDX-License-Identifier: Apache-2.0
// bench/limits.h: what bounds a training step: its floating-point operations, and how fast the machine computes and moves memory.
//
// Flow:    OperationCount counts a step; Triad and Sgemm are timed -> step.cc, bench/prototypes/
// Threads: one counts; torch's threads do the work
// Ranks:   no communication
#pragma once

#include <ATen/ops/add.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randn.h>
#include <ATen/record_function.h>

#include <atomic>
#include <memory>
#include <string_view>

namespace lockstep::bench {

// The operations of an operator on CPUs: a matrix product, convolution or attention. 0 for all others.
inline int64_t operations_of(std::string_view name, c10::ArrayRef<const c10::IValue> inputs) {
  const auto tensor = [&](size_t i) -> const at::Tensor& { return inputs[i].toTensor(); };
  const auto product = [&](size_t left) { return 2 * tensor(left).numel() * tensor(left + 1).size(-1); };
  if (name == "aten::mm" || name == "aten::bmm") return product(0);
  if (name == "aten::addmm" || name == "aten::baddbmm") return product(1);
  // The forward pass too: here the size of the output is known. Last: which gradients are made.
  if (name == "aten::convolution_backward") {
    const at::Tensor& weight = tensor(2);
    const auto made = inputs.back().toBoolList();
    return 2 * tensor(0).numel() * (weight.numel() / weight.size(0)) * (1 + made[0] + made[1]);
  }
  // Two products forward and four backward; half of them where tokens see only earlier ones.
  if (name == "aten::_scaled_dot_product_flash_attention_for_cpu")
    return 6 * 2 * tensor(0).numel() * tensor(1).size(-2) / (inputs[4].toBool() ? 2 : 1);
  return 0;
}

// Counts what all threads do while it lives. One at a time; forward and backward pass lie within.
class OperationCount {
 public:
  OperationCount() {
    counted_ = 0;
    handle_ =
        at::addGlobalCallback(at::RecordFunctionCallback(&count).needsInputs(true).scopes({at::RecordScope::FUNCTION}));
  }
  ~OperationCount() { at::removeCallback(handle_); }
  OperationCount(const OperationCount&) = delete;
  OperationCount& operator=(const OperationCount&) = delete;

  double operations() const { return static_cast<double>(counted_); }

 private:
  static std::unique_ptr<at::ObserverContext> count(const at::RecordFunction& function) {
    counted_ += operations_of(function.name(), function.inputs());
    return nullptr;
  }

  static inline std::atomic<int64_t> counted_ = 0;
  at::CallbackHandle handle_;
};

// a = b + 3 c, over arrays that caches hardly hold.
class Triad {
  static constexpr int64_t kFloats = 32 << 20;

 public:
  static constexpr double kAmount = 4.0 * sizeof(float) * kFloats;  // bytes: a is fetched before it is written

  void operator()() { at::add_out(a_, b_, c_, 3); }

 private:
  at::Tensor a_ = at::empty({kFloats}), b_ = at::ones({kFloats}), c_ = at::ones({kFloats});
};

// The product of two matrices that fit into caches.
class Sgemm {
  static constexpr int64_t kSize = 1024;

 public:
  static constexpr double kAmount = 2.0 * kSize * kSize * kSize;  // operations

  void operator()() { at::mm_out(c_, a_, b_); }

 private:
  at::Tensor a_ = at::randn({kSize, kSize}), b_ = at::randn({kSize, kSize}), c_ = at::empty({kSize, kSize});
};

}  // namespace lockstep::bench
