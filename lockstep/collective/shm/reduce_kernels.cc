// SPDX-License-Identifier: Apache-2.0
#include "lockstep/collective/shm/reduce_kernels.h"

#include <cstdint>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace lockstep::shm {

using Kernel = void (*)(const Reduction&);

namespace avx512 {
Kernel kernel_for(DType dtype, ReduceOp op);  // reduce_kernels_avx512.cc
}

}  // namespace lockstep::shm

#define LOCKSTEP_KERNELS baseline
#if defined(__AVX2__) && defined(__F16C__)
#define LOCKSTEP_VECTOR_BYTES 32
#else
#define LOCKSTEP_VECTOR_BYTES 16
#endif
#include "lockstep/collective/shm/reduce_kernels_body.h"

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

void reduce_with(Kernels kernels, const Reduction& reduction, DType dtype, ReduceOp op) {
  if (reduction.count == 0) return;
  const auto kernel_for = kernels == Kernels::kAvx512 ? avx512::kernel_for : baseline::kernel_for;
  kernel_for(dtype, op)(reduction);
}

void reduce(const Reduction& reduction, DType dtype, ReduceOp op) {
  static const Kernels best = supported(Kernels::kAvx512) ? Kernels::kAvx512 : Kernels::kBaseline;
  reduce_with(best, reduction, dtype, op);
}

}  // namespace lockstep::shm
