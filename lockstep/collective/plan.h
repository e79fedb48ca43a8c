// collective/plan.h: from the tensors of a user to a Collective on memory without gaps, and back.
//
// Flow:    World's calls -> here -> Transport; afterwards finish()
// Owns:    copies of tensors that have gaps, or overlap where they must not
// Threads: values
// Ranks:   no communication. Each function checks this rank's arguments and throws UsageError or DeviceError
#pragma once

#include "lockstep/collective/transport.h"
#include "lockstep/collective/world_state.h"
#include "lockstep/world.h"

namespace lockstep {

struct Plan {
  Collective call;
  torch::Tensor result;  // what the caller gets
  torch::Tensor staged;  // stands for `result`, which has gaps; undefined where that is not so

  void finish() const;  // after the call: brings the result to where it belongs
};

Plan plan_all_reduce(const WorldState& world, const torch::Tensor& tensor, const AllReduceOptions& options);
Plan plan_reduce(const WorldState& world, const torch::Tensor& tensor, const ReduceOptions& options);
Plan plan_reduce_scatter(const WorldState& world, const torch::Tensor& tensor, const ReduceScatterOptions& options);
Plan plan_all_gather(const WorldState& world, const torch::Tensor& tensor, const AllGatherOptions& options);
Plan plan_all_gather_rows(const WorldState& world, const torch::Tensor& tensor, const AllGatherRowsOptions& options);
Plan plan_broadcast(const WorldState& world, const torch::Tensor& tensor, int root);
Plan plan_gather(const WorldState& world, const torch::Tensor& tensor, int root);
Plan plan_scatter(const WorldState& world, const torch::Tensor& parts, const torch::Tensor& output, int root);
Plan plan_all_to_all(const WorldState& world, const torch::Tensor& tensor, const AllToAllOptions& options);

// Messages: `call.input` is sent, `call.output` received.
Plan plan_send(const WorldState& world, const torch::Tensor& tensor, int to, int tag);
Plan plan_receive(const WorldState& world, const torch::Tensor& tensor, const ReceiveOptions& options);

}  // namespace lockstep
