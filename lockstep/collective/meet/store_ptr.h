// SPDX-License-Identifier: Apache-2.0
// collective/meet/store_ptr.h: a c10d store as ranks hold it.
//
// Threads: as the store
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

namespace lockstep {

using StorePtr = c10::intrusive_ptr<c10d::Store>;

}  // namespace lockstep
