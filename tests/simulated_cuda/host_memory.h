// SPDX-License-Identifier: Apache-2.0
// tests/simulated_cuda/host_memory.h: pinned memory, and the copies between it and devices that no thread has waited for yet.
//
// The bytes of a copy to the host appear when the host waits for it; until then there is 0xff, which is NaN. A copy to a
// device reads its source at once; who changes the source before the copy was waited for is found by a checksum.
//
// Threads: mutex() is held by the caller, except for is_pinned() and the allocator
#pragma once

#include <c10/core/Allocator.h>

#include <cstddef>
#include <string>
#include <vector>

#include "tests/simulated_cuda/happens_before.h"

namespace simulated_cuda {

c10::Allocator* pinned_memory();
bool is_pinned(const void* address);

// A copy that runs on `stream` as `moment` and is not waited for.
struct AsyncCopy {
  std::string work;
  Moment moment;
  char* host = nullptr;
  size_t bytes = 0;
};

void copy_to_host_later(AsyncCopy copy, const char* from, const c10::Stream& stream);
// Puts the bytes of the host into `to` as the device sees them.
void copy_from_host(AsyncCopy copy, char* to, const c10::Stream& stream);

// The host has waited: what it has waited for arrives.
void land_copies();

}  // namespace simulated_cuda
