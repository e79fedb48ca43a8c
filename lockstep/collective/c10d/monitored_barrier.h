// SPDX-License-Identifier: Apache-2.0
// collective/c10d/monitored_barrier.h: a barrier that can say which ranks did not come: all report to rank 0, which then
// lets them go. 2(p-1) messages of a byte. The messages of its errors have Gloo's words, for which programs look.
//
// Flow:    c10d/backend.cc -> here -> the backend's messages
// Threads: one at a time
// Ranks:   rank 0 makes hear_of_all_ranks, all others report_to_rank_0
#pragma once

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <chrono>
#include <cstdint>
#include <functional>

#include "lockstep/collective/tensor_call.h"

namespace lockstep::backend {

inline constexpr std::int64_t kBarrierTag = 0x3fffffff;  // the largest that a message between machines may have

// Starts a message to or from a rank.
using StartMessage = std::function<c10::intrusive_ptr<c10d::Work>(Tensors& byte, int peer)>;

// Blocks until all ranks have reported, at most for `timeout`. Throws PeerLost: ranks that did not; `all`: it names all of
// them, else the first.
void hear_of_all_ranks(int size, std::chrono::milliseconds timeout, bool all, const StartMessage& send,
                       const StartMessage& receive);

// Blocks until rank 0 has heard of all ranks, at most for the group's timeout. Throws PeerLost.
void report_to_rank_0(int rank, const StartMessage& send, const StartMessage& receive);

}  // namespace lockstep::backend
