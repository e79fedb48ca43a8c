// SPDX-License-Identifier: Apache-2.0
// collective/machines/hierarchy.h: the transport for CPU tensors of ranks on several machines. A rank has connections
// on two levels:
//
//   inside    the ranks of this machine, in shared memory
//   between   a link to the ranks of the same local number on the other machines, one each
//   all       a link to all ranks
//
// When a rank is lost, or ranks make different calls, all ranks of all machines get PeerLost, those that see the difference
// MismatchError: docs/design/hierarchy.md#loss
//
// Flow:    World, c10d backend -> here -> collectives.h, gloo_messages.h -> the links
// Owns:    the shared memory's group, the connections; memory and transfers of the collective under way; a thread that
//          makes started collectives in the order of their start
// Threads: one at a time, but messages may be started from any; fail() from any
// Ranks:   all of all machines; machines may have different numbers of ranks
#pragma once

#include "lockstep/collective/machines/gloo_messages.h"
#include "lockstep/collective/machines/topology.h"
#include "lockstep/collective/transport/cpu_transport.h"

namespace lockstep {

// Memory and transfers of one chunk. The memory grows to the largest chunk and is used again by later calls.
struct ChunkBuffers {
  shm::Memory packed_memory;
  shm::Memory slice_memory;
  shm::Memory received_memory;
  IntVector<std::byte*> slices;               // of the piece of each machine
  IntVector<const std::byte*> sources;        // what is reduced here, by machine
  std::vector<GlooLink::Transfers> arriving;  // around a ring, one by one
  GlooLink::Transfers receives;
  GlooLink::Transfers results;  // received, of lane 1
  GlooLink::Transfers sends;
};

// Calls `on_loss` when a rank of this machine is lost, also while nobody waits in shared memory: a thread waits for a
// message that only this rank itself sends, in the destructor.
class Watchdog {
 public:
  Watchdog(shm::Group& inside, GlooLink::OnLoss on_loss);
  ~Watchdog();

 private:
  uint8_t goodbye_ = 0;
  shm::GroupPtr group_;
  FuturePtr heard_;
  std::jthread thread_;
};

class Hierarchy final : public CpuTransport {
 public:
  // `group`: the ranks of this machine, in the order of their ranks. Blocks until this rank is connected to all others.
  // Throws RendezvousError.
  Hierarchy(shm::GroupPtr group, const Topology& topology_of_ranks, StorePtr store, TransportOptions options_of_rank);

  // In good order, unless an exception is unwinding: then the others learn at once that this rank is gone.
  ~Hierarchy() override;

  // A collective runs on the calling thread, after those that were started before.
  int run(const TensorCall& call) override;

  // A collective runs on the queue's worker thread: an exchange over the network goes on while the caller computes.
  FuturePtr start(TensorCall call) override;

  std::unique_ptr<Transport> group(const std::vector<int>& ranks, std::optional<milliseconds> separate) override;
  void fail(const std::string& reason) override;
  void set_timeout(milliseconds timeout) override;  // of messages, too

  TransportOptions options;
  const Topology topology;
  const int rank;
  const int machine;           // this rank's
  const int machines;          // their number
  const int smallest_machine;  // topology.smallest_machine()
  const std::vector<int> ranks_here;

  std::array<ChunkBuffers, 4> buffers;   // of four chunks in turn
  std::unique_ptr<std::byte[]> scratch;  // of the call under way

  GlooLink all;
  GlooMessages messages;              // over `all`
  std::unique_ptr<GlooLink> between;  // null where this rank never owns a slice

 private:
  std::unique_ptr<GlooLink> connect_counterparts() const;
  void check(const Call& call) const;
  FuturePtr start_message(const TensorCall& call, bool in_background);
  void make_call(const Call& call);
  void set_timeout_of_collectives(milliseconds timeout);
  std::exception_ptr cause_of(const std::exception_ptr& error) const;
  void give_up(const std::exception_ptr& error);
  void close(const std::exception_ptr& reason);

  StorePtr store_;
  std::optional<Watchdog> watchdog_;
  int groups_made_ = 0;
};

}  // namespace lockstep
