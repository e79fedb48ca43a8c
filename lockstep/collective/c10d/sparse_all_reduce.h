// SPDX-License-Identifier: Apache-2.0
// collective/c10d/sparse_all_reduce.h: the sum of sparse tensors (COO), as c10d's Gloo computes it.
//
// Flow:    c10d/backend.cc -> here -> the transport's all_gather
// Owns:    copies of all ranks' entries, while it runs
// Threads: the returned function runs on the thread that makes the backend's collectives
// Ranks:   all; the tensors have one shape, number of sparse dimensions and dtype, and any numbers of entries
#pragma once

#include <torch/csrc/distributed/c10d/Types.hpp>

#include <functional>

#include "lockstep/collective/c10d/backend_calls.h"

namespace lockstep::backend {

// What makes the collective: `tensor` is then the coalesced sum of all ranks' tensors. Each rank receives all entries of
// all ranks. Throws UsageError at once: not a sum; a tensor that is not on the CPU. The function: MismatchError on all
// ranks, after which the group is as before; PeerLost.
std::function<void(Transport&)> sparse_all_reduce(Member member, const torch::Tensor& tensor,
                                                     const c10d::AllreduceOptions& options);

}  // namespace lockstep::backend
