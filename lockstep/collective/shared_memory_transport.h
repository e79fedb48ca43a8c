// SPDX-License-Identifier: Apache-2.0
// collective/shared_memory_transport.h: the shared-memory core as a transport for host tensors.
//
// Flow:    connect.h -> here; World, c10d backend -> here -> collective/shm/
// Owns:    this rank's side of the shared memory
// Ranks:   every rank of the machine makes its transport at the same time
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/collective/call_queue.h"
#include "lockstep/collective/shm/group.h"
#include "lockstep/collective/transport.h"

namespace lockstep {

class SharedMemoryTransport final : public CpuTransport {
 public:
  explicit SharedMemoryTransport(shm::Group group) : group_(std::move(group)) {}

  // In good order, unless an exception is on its way out: then the others learn at once that this rank is gone.
  ~SharedMemoryTransport() override;

  FuturePtr start(TensorCall call) override;
  int run(const TensorCall& call) override;
  std::unique_ptr<Transport> group(const RankLists& lists) override;
  std::unique_ptr<Transport> separate(const RankLists& lists, std::chrono::milliseconds timeout) override;
  torch::Tensor allocate(torch::IntArrayRef sizes, const torch::TensorOptions& options) override;
  std::optional<shm::Group> machine_group() override;
  void fail(const std::string& reason) override { group_.poison(reason); }
  CallQueue& queue() override { return queue_; }
  void set_timeout(std::chrono::milliseconds timeout) override;

 private:
  struct Message {
    TensorCall call;  // keeps the memory
    FuturePtr future;
  };

  FuturePtr start_message(TensorCall call);
  void forget_done();  // messages

  // Destroyed in reverse order: first the queue, whose thread uses the group; last the tensors that the group's
  // messages use.
  std::mutex mutex_;
  std::list<Message> messages_;  // under way; guarded by mutex_
  shm::Group group_;
  CallQueue queue_;
};

// The text of every rank in rank order, through a store, once per topic. Throws RendezvousError naming the ranks that
// did not come.
std::vector<std::string> exchange_texts(c10d::Store& store, const std::string& topic, const std::string& mine,
                                        const TransportOptions& options);

// `ranks` are the processes of this machine: through the store they exchange an address, then memory. All ranks call.
// Blocks until those of this machine are connected. Throws RendezvousError, SystemError.
shm::Group connect_shared_memory(c10d::Store& store, const std::vector<int>& ranks, const TransportOptions& options);

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

}  // namespace lockstep
