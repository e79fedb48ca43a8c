// SPDX-License-Identifier: Apache-2.0
// The kernels with 64-byte vectors. Nothing here may run before the processor was asked (reduce_kernels.cc).
#include <cstdint>

#include "lockstep/collective/shm/reduce_kernels.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace lockstep::shm {

using Kernel = void (*)(const Reduction&);

}  // namespace lockstep::shm

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

Kernel kernel_for(DType, ReduceOp) { return nullptr; }

}  // namespace lockstep::shm::avx512
#endif
