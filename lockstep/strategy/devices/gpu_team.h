// SPDX-License-Identifier: Apache-2.0
// strategy/devices/gpu_team.h: the collectives of lockstep/devices.h between devices that are GPUs of one process, by
// copies from peer to peer. The steps and bytes are those of docs/collectives.md.
//
// Every device lays its tensor on the team's table. Between two waits of the whole team it reads tensors of its peers and
// writes its own. Nothing here waits for a GPU: a copy between two GPUs runs in the order of both their streams, the
// waits of the threads make sure that what it depends on was put on these streams before it, and what may overwrite its
// source after it.
//
// Owns:    nothing
// Threads: each device's own
// Ranks:   inside one process: all devices of a team make the same calls
#pragma once

#include <vector>

#include "lockstep/collective/shm/group.h"
#include "lockstep/collective_types.h"

#include <torch/types.h>

namespace lockstep {

// A copy of a dense tensor on the GPU, in the order of both devices' current streams; the tensor itself if it is there. Between
// GPUs that don't reach each other it goes through pinned memory. Does not block.
torch::Tensor brought_to(torch::Device gpu, const torch::Tensor& tensor);

class GpuTeam {
 public:
  // table: of the team, with a place for each device.
  GpuTeam(shm::Group& group, std::vector<torch::Tensor>& table) : group_(group), table_(table) {}

  // flat: one-dimensional, on this device's GPU. Throw PeerLost, MismatchError.
  void all_reduce(const torch::Tensor& flat, Algorithm algorithm);
  void reduce(const torch::Tensor& flat, int root);
  void broadcast(const torch::Tensor& flat, int root);

 private:
  template <class Work>
  void together(Call call, const torch::Tensor& flat, const Work& work);
  void all_reduce_central(const torch::Tensor& mine);
  void all_reduce_direct(const torch::Tensor& mine);
  void all_reduce_ring(const torch::Tensor& mine);
  void all_reduce_tree(const torch::Tensor& mine);
  void sum_of_all(const torch::Tensor& mine, std::int64_t begin, std::int64_t end);
  int rank() const { return group_.rank(); }
  int size() const { return group_.size(); }
  const torch::Tensor& of(int rank) const;

  shm::Group& group_;
  std::vector<torch::Tensor>& table_;
};

}  // namespace lockstep
