// SPDX-License-Identifier: Apache-2.0
// tests/simulated_cuda/memory.h: the memory of the simulated devices. The program's addresses can't be touched by the host;
// the simulator reaches the same bytes through a second mapping.
//
// Threads: mutex() is held by the caller, except for real_address()
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Stream.h>

#include <cstddef>
#include <map>
#include <optional>
#include <set>
#include <utility>

#include "tests/simulated_cuda/happens_before.h"

namespace simulated_cuda {

struct Block {
  c10::Stream stream;  // on which it was allocated, and is used again once it is free
  size_t bytes = 0;
  Uses uses{};
  std::set<std::pair<int, c10::StreamId>> recorded{};  // streams that record_stream() named
};

// The block that an address of a device lies in, and where in it.
struct Place {
  Block* block = nullptr;
  size_t offset = 0;
};
std::optional<Place> place_of(const void* address);

int device_of_address(const void* address);  // -1: not a device's
void* real_address(const void* address);     // what the simulator may read and write

c10::Allocator* device_memory();
void record_stream(const void* address, const c10::Stream& stream);

}  // namespace simulated_cuda
