// SPDX-License-Identifier: Apache-2.0
#include "lockstep/collective/shm/reduce_kernels.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "lockstep/collective/shm/thresholds.h"

namespace lockstep::shm {

using Kernel = void (*)(const Reduction&);

}  // namespace lockstep::shm

#define LOCKSTEP_KERNELS baseline
#if defined(__AVX2__) && defined(__F16C__)
#define LOCKSTEP_VECTOR_BYTES 32
#else
#define LOCKSTEP_VECTOR_BYTES 16
#endif
#include "lockstep/collective/shm/reduce_kernels_body.h"

// The same with 64-byte vectors, or what the machine has. Nothing there may run before the processor was asked.
#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl")
#endif
#define LOCKSTEP_KERNELS avx512
#define LOCKSTEP_VECTOR_BYTES 64
#include "lockstep/collective/shm/reduce_kernels_body.h"
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#else
namespace lockstep::shm::avx512 {
using baseline::kernel_for;
}
#endif

namespace lockstep::shm {

bool supported(Kernels kernels) {
  if (kernels == Kernels::kBaseline) return true;
#if defined(__x86_64__)
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
#else
  return false;
#endif
}

bool defined(DType dtype, ReduceOp op) { return baseline::kernel_for(dtype, op) != nullptr; }

const Kernels kBestKernels = supported(Kernels::kAvx512) ? Kernels::kAvx512 : Kernels::kBaseline;

void reduce(const Reduction& reduction, DType dtype, ReduceOp op, Kernels kernels) {
  if (reduction.count == 0) return;
  const auto kernel_for = kernels == Kernels::kAvx512 ? avx512::kernel_for : baseline::kernel_for;
  kernel_for(dtype, op)(reduction);
}

void copy_bytes(std::byte* to, const std::byte* from, size_t bytes) {
  constexpr size_t kSmall = 2048;
  if (bytes == 0 || to == from) return;
  if (bytes < kSmall) {
    std::memcpy(to, from, bytes);
    return;
  }
  reduce({.sources = {&from, 1}, .destinations = {&to, 1}, .count = bytes}, DType::kUInt8, ReduceOp::kBitOr);
}

void show_bytes(std::byte* to, const std::byte* from, size_t bytes) {
  if (bytes < kStreamFromBytes) return copy_bytes(to, from, bytes);
  reduce({.sources = {&from, 1}, .destinations = {&to, 1}, .count = bytes, .streamed = 1}, DType::kUInt8,
         ReduceOp::kBitOr);
}

}  // namespace lockstep::shm
