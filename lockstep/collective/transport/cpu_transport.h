// SPDX-License-Identifier: Apache-2.0
// collective/transport/cpu_transport.h: the transport of CPU tensors between the ranks of one machine: the shared-memory core.
// Hierarchy (machines/hierarchy.h), which carries them between machines, derives from it.
//
// Flow:    connect.h -> here; World, c10d backend -> here -> collective/shm/
// Owns:    this rank's side of the shared memory
// Ranks:   every rank of the machine makes its transport at the same time
#pragma once

#include <list>

#include "lockstep/collective/calls/call_queue.h"
#include "lockstep/collective/transport/transport.h"

namespace lockstep {

class CpuTransport : public Transport {
 public:
  // `group`: the ranks of this machine. `here`: this rank, for messages.
  explicit CpuTransport(shm::GroupPtr group, std::string here = {})
      : inside(std::move(group)), queue_(std::move(here)) {}

  // In good order, unless an exception is on its way out: then the others learn at once that this rank is gone.
  ~CpuTransport() override;

  FuturePtr start(TensorCall call) override;
  int run(const TensorCall& call) override;
  std::unique_ptr<Transport> group(const std::vector<int>& ranks, std::optional<milliseconds> separate) override;
  torch::Tensor allocate(torch::IntArrayRef sizes, const torch::TensorOptions& options) override;
  shm::GroupPtr machine_group() override;
  void fail(const std::string& reason) override { inside->poison(reason); }

  // The queue that runs collectives. A collective started from inside another runs immediately.
  CallQueue& queue() { return queue_; }

  // Sets the longest time of every wait from now on, after the calls that were started before.
  virtual void set_timeout(milliseconds timeout);

 protected:
  // A group of `ranks`, which are numbers in `inside`; none where they are none. Every rank calls. separate: in memory of
  // its own; blocks until they are connected, and throws RendezvousError, SystemError.
  shm::GroupPtr group_inside(const std::vector<int>& ranks, std::optional<milliseconds> separate) const;

 private:
  struct Message {
    TensorCall call;  // keeps the memory
    FuturePtr future;
  };

  // Before a message: the worker thread makes what is deferred; memory of messages that are done goes.
  void prepare_message();

  // Destroyed in reverse order: first the queue, whose thread uses the group; last the tensors that the group's
  // messages use.
  std::mutex mutex_;
  std::list<Message> messages_;  // under way; guarded by mutex_

 public:
  const shm::GroupPtr inside;

 protected:
  CallQueue queue_;
};

// The text of every rank in rank order, through a store, once per topic. Throws RendezvousError naming the ranks that
// did not come.
std::vector<std::string> exchange_texts(c10d::Store& store, const std::string& topic, const std::string& mine,
                                        const TransportOptions& options);

// `ranks` are the processes of this machine: through the store they exchange an address, then memory. All ranks call.
// Blocks until those of this machine are connected. Throws RendezvousError, SystemError.
shm::GroupPtr connect_shared_memory(c10d::Store& store, const std::vector<int>& ranks, const TransportOptions& options);

// Another group of the same ranks. Every rank of the group calls.
shm::GroupPtr whole_group_of(shm::Group& group);

}  // namespace lockstep
