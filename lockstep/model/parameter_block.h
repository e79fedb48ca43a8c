// SPDX-License-Identifier: Apache-2.0
// model/parameter_block.h: the parameters of a module in one block of memory, which exists once per machine. Names,
// shapes and strides do not change; the modules of all ranks use the same bytes.
//
// Flow:    a module -> here -> forward and backward read it; step/update/ writes it, a slice per rank
// Owns:    the block, together with every tensor in it
// Threads: one thread
// Ranks:   the ranks of a machine construct it together, from modules that are alike
//
// Layout: parameters one after another in the module's order, each at a multiple of 64 bytes, of any dtype; frozen ones
// and empty ones too. A weight that has two names is in it once.
//
// All ranks see every write at once, so only step() may write, between its barriers 2 and 3. require_in_place() finds what
// breaks this: a parameter that moved (Module::to(dtype), set_data) or that was written to. With LOCKSTEP_CHECK set the block
// is read-only except between begin_write() and end_write().
#pragma once

#include "lockstep/base/process/page_guard.h"
#include "lockstep/collective/shared_memory.h"
#include "lockstep/model/data_watch.h"
#include "lockstep/model/parameters.h"

namespace lockstep {

class ParameterBlock {
 public:
  // Moves the parameters into the block, with the values of the machine's first rank. Blocks. parameters: dense, on the
  // CPU. Throws UsageError (not dense), SystemError (no memory), PeerLost.
  ParameterBlock(SharedMemory& memory, NamedTensors parameters);

  // Throws UsageError naming a parameter that is no longer in the block, or was written since the last mark_written().
  void require_in_place() const;
  void require_not_moved() const;                 // the first half of it
  std::optional<size_t> written_by_hand() const;  // the second: which parameter

  // Throws UsageError naming a parameter that was written in a way that neither the version counters nor data() show. Only
  // where no rank may be writing: between backward() and barrier 2.
  void require_same_samples() const;

  // Gives the parameters memory of this rank's own, with the same values: whatever trains them next is not to write into that of
  // other ranks. The last call. Where there is no memory it logs that.
  void leave() noexcept;

  class Copies;

  // This rank is about to write its slice, after barrier 2; and has written it, before barrier 3.
  void begin_write() { write_.emplace(); }
  void end_write() { write_.reset(); }

  // The parameters were written on purpose, by the optimizer or from a checkpoint. Raises their version counters, so that
  // a graph made before fails with an error; the values are what require_in_place() accepts from now on.
  void mark_written();

 private:
  void protect();
  uint64_t hash() const;  // of what all ranks see

  struct Entry {
    NamedTensor parameter;
    const std::byte* place;
    uint32_t version;
    uint64_t samples;
  };
  const bool is_shared_;  // with other ranks
  const bool is_first_;   // of these
  std::vector<Entry> entries_;
  DataWatch watch_;  // of the same tensors
  std::shared_ptr<std::byte> memory_;
  std::optional<PageGuard> guard_;
  std::optional<ParameterWrite> write_;
};

// While it exists, the parameters and all tensors that share their storage are copies of this rank's own: no other rank sees
// what is written there. Without publish() it is forgotten.
class ParameterBlock::Copies {
 public:
  // Throws UsageError: a parameter was written by hand before.
  explicit Copies(ParameterBlock& block);
  ~Copies();
  Copies& operator=(Copies&&) = delete;

  // Throws UsageError: the block itself was written.
  void require_unseen();

  // All ranks have written. The copies of the machine's first rank become the values of all after its next barrier.
  void publish();

 private:
  void swap();

  struct Copy {
    c10::Storage storage;
    at::DataPtr other;  // that the storage doesn't have now: the copy, or the place in the block
    const std::byte* place;
    size_t bytes;
  };
  ParameterBlock& block_;
  const uint64_t hash_;
  std::vector<Copy> copies_;
  bool is_accepted_ = true;  // what is in the block at the end
};

// Gives those that are in a block memory of their own, whoever made the block.
void leave_block(const NamedTensors& parameters);

}  // namespace lockstep
