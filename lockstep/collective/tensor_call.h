// SPDX-License-Identifier: Apache-2.0
// collective/tensor_call.h: a Call on torch's tensors: checks the arguments, makes tensors dense, keeps them alive.
//
// Flow:    World's calls, c10d/backend_calls.h -> here; begin() -> Transport -> finish()
// Owns:    references to the tensors; copies of those that have gaps, or overlap where they must not
// Threads: values
// Ranks:   no communication. Each function checks this rank's arguments and throws UsageError or DeviceError
#pragma once

#include <torch/types.h>

#include <string>
#include <vector>

#include "lockstep/collective/call.h"
#include "lockstep/world.h"

namespace lockstep {

// The rank that makes a call.
struct Caller {
  int rank = 0;
  int size = 1;
  torch::Device device = torch::kCPU;  // where its tensors belong; those on the CPU are fine too
  std::string here;                    // "rank 2 of 4 on gpu-a", for messages
};

using Tensors = std::vector<torch::Tensor>;

struct TensorCall {
  Call call;             // its memory is that of the next two
  torch::Tensor input;   // dense; undefined where this rank gives nothing
  torch::Tensor output;  // dense; undefined where this rank gets nothing
  torch::Tensor result;  // what the caller gets: the output, or the tensor with gaps that it stands for
  Tensors copied_from;   // what `input` is a copy of; none: it is the caller's memory
  Tensors copied_to;     // likewise, of `output`

  void begin() const;   // before the call: fills an input that is a copy
  void finish() const;  // after the call: copies the output to where the caller wants it
};

// `call` on these tensors, each list as one array: in place where its tensors are dense and lie one after the other,
// otherwise a copy. An input is also copied if it overlaps an output that is not the same tensors. Tensors in lists of
// several are on the CPU.
TensorCall with_memory(Call call, const Tensors& inputs, const Tensors& outputs);

TensorCall barrier_call();
TensorCall all_reduce_call(const Caller& caller, const torch::Tensor& tensor, const AllReduceOptions& options);
TensorCall reduce_call(const Caller& caller, const torch::Tensor& tensor, const ReduceOptions& options);
TensorCall reduce_scatter_call(const Caller& caller, const torch::Tensor& tensor, const ReduceScatterOptions& options);
TensorCall all_gather_call(const Caller& caller, const torch::Tensor& tensor, const AllGatherOptions& options);
TensorCall all_gather_rows_call(const Caller& caller, const torch::Tensor& tensor, const AllGatherRowsOptions& options);
TensorCall broadcast_call(const Caller& caller, const torch::Tensor& tensor, int root);
TensorCall gather_call(const Caller& caller, const torch::Tensor& tensor, int root);
TensorCall scatter_call(const Caller& caller, const torch::Tensor& parts, const torch::Tensor& output, int root);
TensorCall all_to_all_call(const Caller& caller, const torch::Tensor& tensor, const AllToAllOptions& options);
TensorCall send_call(const Caller& caller, const torch::Tensor& tensor, int to, int tag);
TensorCall receive_call(const Caller& caller, const torch::Tensor& tensor, const ReceiveOptions& options);

}  // namespace lockstep
