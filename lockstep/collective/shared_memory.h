// SPDX-License-Identifier: Apache-2.0
// collective/shared_memory.h: memory that the ranks of one machine read and write directly, beyond collectives:
// parameters that exist once per machine, gradients that other ranks read.
//
// Flow:    World -> of() -> model/parameter_block.h, step/
// Owns:    what it allocates, until the last user on any rank has released it
// Threads: one at a time; memory may be released on any thread
// Ranks:   the ranks of one machine make the calls marked "collective" in the same order
//
// A rank may read another rank's memory only between two barrier() that both call. Where ranks can't share memory (CUDA
// tensors, a world of one), a SharedMemory has one rank and is ordinary memory.
#pragma once

#include <memory>
#include <optional>

#include "lockstep/collective/calls/call.h"
#include "lockstep/world.h"

namespace lockstep {

namespace shm {
class Arena;
class Group;
}  // namespace shm

class SharedMemory : public std::enable_shared_from_this<SharedMemory> {
 public:
  // Shared by the ranks of `world` on this machine. Collective over the world; blocks until all ranks are there.
  static std::shared_ptr<SharedMemory> of(const World& world);

  // Makes one for this rank alone. With an arena, in its memory: whoever holds the arena's file can read it when the process is gone.
  static std::shared_ptr<SharedMemory> alone(std::shared_ptr<shm::Arena> arena = nullptr);

  int rank() const;  // among the ranks that share
  int size() const;

  // Tells whether somebody else can hold the memory, so that it outlives the ranks; and begins to hold all that this rank allocates.
  bool outlives_ranks() const { return outlives_ranks_; }
  void keep() const;

  // Zeroed memory that exists once for all ranks, at a multiple of 64 bytes. Collective, with the same size on every
  // rank; blocks. It stays valid until the last rank has released it. by_shares, of rank 0: the r-th share is in the NUMA node of
  // rank r, which updates it. Throws SystemError: no memory left; PeerLost.
  std::shared_ptr<std::byte> allocate_common(size_t bytes, bool by_shares = machine_has_several_nodes());

  // Memory of this rank that the others can read, not zeroed. Throws SystemError.
  struct Own {
    std::shared_ptr<std::byte> data;
    uint64_t place = 0;  // for peer()
  };
  Own allocate(size_t bytes);

  // The address here of the memory that `rank` has allocated at `place`. Throws SystemError: not mappable.
  std::byte* peer(int rank, uint64_t place, size_t bytes);

  // Finds `bytes` bytes at `address` in an arena, as another process that maps the arena's file needs them. None: in no
  // arena.
  struct ArenaOffset {
    int arena = 0;  // the rank of the machine that has it
    uint64_t offset = 0;
  };
  std::optional<ArenaOffset> locate(const void* address, size_t bytes) const;

  // Returns once every rank has called it; every write before it is visible after it. Waits at most for the world's
  // timeout. Throws MismatchError on all ranks: they announced different things, or are at different calls; PeerLost.
  void barrier(const Signature& announced = {.operation = Operation::kBarrier});

  // Before this rank writes what the others can read. Throws UsageError: this is a forked child of the rank.
  void require_own_process() const;

  // This rank has failed: the others get PeerLost with this reason now, not at their deadline.
  void fail(const std::string& reason);

 private:
  static bool machine_has_several_nodes();
  SharedMemory(std::shared_ptr<shm::Group> group, std::shared_ptr<shm::Arena> arena);

  std::shared_ptr<shm::Group> group_;  // none: alone
  std::shared_ptr<shm::Arena> arena_;  // alone: where memory comes from; none: ordinary memory
  bool outlives_ranks_ = false;
};
using SharedMemoryPtr = std::shared_ptr<SharedMemory>;

}  // namespace lockstep
