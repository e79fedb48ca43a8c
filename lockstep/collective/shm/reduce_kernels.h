// SPDX-License-Identifier: Apache-2.0
// collective/shm/reduce_kernels.h: reduces n arrays into one result, element by element, and stores it in m places.
//
// Each result is ((x0 op x1) op x2) ... in the order of the sources, so its bits do not depend on the vector width, on
// where an array is cut into slices, or on which rank does the work.
//
// Flow:    memory of all ranks -> vector registers -> memory of all ranks; every byte is read and written once
// Threads: no state; any thread
// Ranks:   no communication
#pragma once

#include <cstddef>
#include <span>

#include "lockstep/collective_types.h"

namespace lockstep::shm {

struct Reduction {
  std::span<const std::byte* const> sources;  // n >= 1 arrays of `count` elements, any alignment
  std::span<std::byte* const> destinations;   // m >= 1; each is one of the sources or overlaps none of them
  size_t count = 0;
  int divisor = 1;      // kMean: what the sum is divided by
  size_t streamed = 0;  // the first so many destinations are stored past the caches: another core reads them next
};

bool defined(DType dtype, ReduceOp op);  // no bit operations on floats, no mean of bool

// Chosen by asking the processor; named so that tests can compare them.
enum class Kernels { kBaseline, kAvx512 };
bool supported(Kernels kernels);
extern const Kernels kBestKernels;

void reduce(const Reduction& reduction, DType dtype, ReduceOp op,
            Kernels kernels = kBestKernels);  // requires defined()

// Copies with the same loads and stores: memcpy's "rep movsb" is much slower on some processors. Memory onto itself, and null
// pointers where there is nothing to copy, are fine.
void copy_bytes(std::byte* to, const std::byte* from, size_t bytes);

// The same for memory at a multiple of 64 that a peer reads next and that this rank has shown it before: by streaming stores
// (docs/design/shared-memory.md#where-data-lies).
void show_bytes(std::byte* to, const std::byte* from, size_t bytes);

}  // namespace lockstep::shm
