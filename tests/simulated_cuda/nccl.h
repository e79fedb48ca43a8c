// SPDX-License-Identifier: Apache-2.0
// tests/simulated_cuda/nccl.h: collectives between simulated GPUs with NCCL's rules, over Gloo.
//
// A call waits for the current stream of its device and runs on a stream of its own; Work::wait() lets the current stream wait
// for it. All ranks make the same calls in the same order, else the error says which calls met; on a GPU they would hang.
// CPU tensors, tensors with gaps, bitwise reductions and two ranks on one GPU are errors.
//
// Threads: one per rank
// Ranks:   all make one at the same time, with the same store
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>

extern "C" {

// The caller owns the reference. Blocks until this rank is connected to all others.
c10d::Backend* lockstep_simulated_nccl(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                                       std::chrono::milliseconds timeout);
}
