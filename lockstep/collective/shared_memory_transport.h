// SPDX-License-Identifier: Apache-2.0
// collective/shared_memory_transport.h: the shared-memory core as a transport for host tensors.
//
// Flow:    World -> here -> collective/shm/
// Owns:    this rank's side of the shared memory
// Ranks:   every rank of the machine makes its transport at the same time
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "lockstep/collective/shm/group.h"
#include "lockstep/collective/transport.h"

namespace lockstep {

// `ranks` of `world` are the processes of this machine: through the world's store they exchange an address, then
// memory. All ranks of the world call. Blocks until those of this machine are connected. Throws RendezvousError,
// SystemError.
shm::Group connect_shared_memory(const World& world, const std::vector<int>& ranks, const TransportOptions& options);

// The group of lists[rank], none where that is empty. Every rank of the group calls, with the same lists.
std::optional<shm::Group> subgroup_of(shm::Group& group, const RankLists& lists);

// Another group of the same ranks. Every rank of the group calls.
shm::Group whole_group_of(shm::Group& group);

// As subgroup_of, but in memory of its own. Blocks until the ranks of the list are connected. Throws RendezvousError,
// SystemError.
std::optional<shm::Group> separate_group_of(shm::Group& group, const RankLists& lists,
                                            std::chrono::milliseconds timeout);

// As World::allocate.
torch::Tensor allocate_shared(shm::Group& group, torch::IntArrayRef sizes, const torch::TensorOptions& options);

std::unique_ptr<Transport> make_shared_memory(shm::Group group);

// Ranks that are threads of this process: the transport of each, in rank order.
std::vector<std::unique_ptr<Transport>> make_shared_memory_of_threads(int ranks, std::chrono::milliseconds timeout);

}  // namespace lockstep
