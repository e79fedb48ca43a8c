// SPDX-License-Identifier: Apache-2.0
// strategy/devices/gpu_team.h: the collectives of lockstep/devices.h between devices that are GPUs of one process, by
// copies from peer to peer. The steps and bytes are those of docs/collectives.md.
//
// Every device lays its tensor on the team's table. Between two waits of the whole team it reads tensors of its peers
// and writes its own. Nothing here waits for a GPU: docs/design/gpus.md says why ("Streams").
//
// Owns:    nothing
// Threads: each device's own
// Ranks:   inside one process: all devices make the same calls
#pragma once

#include "lockstep/collective/shm/group.h"
#include "lockstep/named_tensor.h"

namespace lockstep {

// A copy of a dense tensor on the GPU, in the order of both devices' current streams; the tensor itself if it is there.
// Between GPUs that don't reach each other it goes through pinned memory. Does not block.
Tensor brought_to(torch::Device gpu, const Tensor& tensor);

// An all_reduce, reduce or broadcast of `flat`, one-dimensional on this device's GPU, with call.count and call.dtype.
// table: one for all devices, with a place for each. Throws PeerLost, MismatchError.
void run_between_gpus(shm::Group& group, Tensors& table, const Call& call, const Tensor& flat);

}  // namespace lockstep
