// SPDX-License-Identifier: Apache-2.0
// strategy/averaging/background_sum.h: sums of tensors over all ranks, which go on while the ranks compute. The ranks of a
// machine add theirs up in shared memory; the first rank of each machine exchanges the sums.
//
//   float32   all-reduce: 2(n-1)/n K leave each of n machines
//   int8      all-gather of int8_blocks.h: (n-1)/4 K leave each; a machine adds what was lost to its next sum of that part
//
// All ranks get the same bits.
//
// Owns:    worlds of its own, so that no other call waits for what is under way; in int8 what was lost
// Threads: one thread
// Ranks:   all ranks make the same calls in the same order
#pragma once

#include <optional>
#include <vector>

#include "lockstep/world.h"

namespace lockstep {

class BackgroundSum {
 public:
  // parts: tensors like those to be summed, (n) each. Blocks until all ranks have made it.
  BackgroundSum(const World& world, const Tensors& parts, bool in_int8);

  // mine: on the CPU, overwritten. Returns the bytes that this machine gives. Blocks for its ranks alone. Throws PeerLost.
  int64_t start(size_t part, const Tensor& mine);

  // Returns the sum, after start(). Blocks. Throws PeerLost.
  Tensor finish(size_t part);

  // Adds up what was lost, so that it is the same everywhere, as a checkpoint needs it; each machine goes on with an
  // equal share. Blocks. Throws PeerLost.
  void even_out();

  NamedTensors state();                     // what all lost, after even_out(); restored in place
  void restored() { lost_is_sum_ = true; }  // state()

 private:
  bool sends_int8() const { return machines_ > 1 && !lost_.empty(); }
  void share(const Tensor& tensor, std::optional<Work> work);  // with the machine, once the first rank's work is done

  World machine_;
  std::optional<World> firsts_;  // of the machines; none: this rank is not the first of its own
  int64_t machines_ = 1;
  Tensors lost_;  // of each part; none in float32. On one machine without memory, except from state() to start()
  bool lost_is_sum_ = true;  // over all machines, not this machine's alone
  struct UnderWay {
    Tensor tensor;  // the sum, or all machines' bytes
    std::optional<Work> work{};
  };
  std::vector<UnderWay> under_way_;
};

}  // namespace lockstep
