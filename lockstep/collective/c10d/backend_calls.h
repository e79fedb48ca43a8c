// SPDX-License-Identifier: Apache-2.0
// collective/c10d/backend_calls.h: c10d's lists of tensors as a TensorCall: counts, dtypes, reductions; and the checks
// that c10d leaves to its backends.
//
// Flow:    collective/c10d/backend.cc -> here -> collective/calls/tensor_call.h
// Threads: values
// Ranks:   no communication
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "lockstep/base/text.h"
#include "lockstep/collective/transport/transport.h"

namespace lockstep::backend {

// A rank of a group, and the group's size.
struct GroupRank {
  int rank;
  int size;
};

// `call` has operation, root, peer and tag, and the counts of an all_to_all in elements; the other counts come from the
// tensors. A whole of several parts is a tensor per rank, or one tensor for all. Dtypes that the core does not know move
// as bytes. Throw UsageError, DeviceError.
TensorCall call_to_move(GroupRank member, Call call, const Tensors& inputs, const Tensors& outputs);

// Complex numbers are reduced as pairs.
TensorCall call_to_reduce(GroupRank member, Call call, const Tensors& inputs, const Tensors& outputs,
                          const c10d::ReduceOp& op);

// Blocks: fills an input that is a copy, makes the call, copies the output back.
void run_to_its_end(Transport& transport, const TensorCall& call);

// The counts of an all_to_all.
std::vector<size_t> counts_of_tensors(const Tensors& tensors, int size);

void require_cpu(const Tensor& tensor);  // throws DeviceError
// Throws UsageError: another number of tensors, or of lists of tensors.
void require_number(size_t given, size_t wanted);

template <class T>
const T& only_one(const std::vector<T>& list) {
  require_number(list.size(), 1);
  return list.front();
}

// ---- The sum of sparse tensors (COO), as c10d's Gloo computes it (sparse_all_reduce.cc)

// Returns what makes the collective: `tensor` is then the coalesced sum of all ranks' tensors, which have one shape, number
// of sparse dimensions and dtype, and any numbers of entries. Each rank receives all entries of all ranks. Throws UsageError
// at once: not a sum; a tensor that is not on the CPU. The function: MismatchError on all ranks, after which the group is as
// before; PeerLost.
std::function<void(Transport&)> sparse_all_reduce(GroupRank member, const Tensor& tensor,
                                                  const c10d::AllreduceOptions& options);

// ---- A barrier that can say which ranks did not come (monitored_barrier.cc): all report to rank 0, which then lets them go.
// 2(p-1) messages of a byte. The messages of its errors have Gloo's words, for which programs look.

// Rank 0 blocks until all ranks have reported, at most for `timeout`; the others until it has heard of all, at most for
// the group's timeout. Throws PeerLost: on rank 0 about the ranks that did not report; `all`: it names all of them,
// else the first.
void monitored_barrier(c10d::Backend& group, milliseconds timeout, bool all);

}  // namespace lockstep::backend
