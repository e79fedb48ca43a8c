// model/parameter_block.h: the parameters of a module in one block of memory, which exists once per machine. Names,
// shapes and strides stay what they were; every rank's module looks at the same bytes.
//
// Flow:    a module -> here -> forward and backward read it; optimizer/ writes it, a slice per rank
// Owns:    a share of the block; so does every tensor that lies in it
// Threads: one thread
// Ranks:   the ranks of a machine construct it together, from modules that are alike
//
// Layout: parameters one after another in the module's order, each at a multiple of 64 bytes, of any dtype; frozen ones
// and empty ones too. A weight that has two names lies there once.
//
// Since peers see every write at once, only step() may write, at a moment on which all ranks agree. What breaks this is
// found out by require_in_place(): a parameter that moved (Module::to(dtype), set_data) or that was written to.
#pragma once

#include <torch/types.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "lockstep/collective/shared_memory.h"
#include "lockstep/model/parameters.h"

namespace lockstep {

class ParameterBlock {
 public:
  // Moves the parameters into the block, with the values of the machine's first rank. Blocks. parameters: dense, on the
  // CPU. Throws UsageError (not dense), SystemError (no memory), PeerLost.
  ParameterBlock(SharedMemory& memory, std::vector<NamedTensor> parameters);

  // Throws UsageError naming a parameter that no longer lies in the block, or was written since the last
  // mark_written().
  void require_in_place() const;

  // The parameters were written on purpose, by the optimizer or from a checkpoint: autograd is told, so that a graph
  // made before fails with an error, and what is there now is taken for right.
  void mark_written();

 private:
  struct Entry {
    NamedTensor parameter;
    const void* place;
    std::uint32_t version;
  };
  std::vector<Entry> entries_;
};

}  // namespace lockstep
