// SPDX-License-Identifier: Apache-2.0
#include "lockstep/collective/machines/machine_collective.h"

#include "lockstep/collective/shm/reduce_kernels.h"

namespace lockstep {

shm::Part MachineCollective::slice_of(const shm::Part& range, int owner) const {
  if (owner >= slices_) return {range.begin + range.count, 0};
  const shm::Part slice = shm::Partition::even(range.count, slices_, kCacheLine / bytes(1))[owner];
  return {range.begin + slice.begin, slice.count};
}

void MachineCollective::run_inside(std::size_t chunk, const Call& call) {
  if (chunk > 0) return run_inside(call);
  hierarchy_.inside->run(call, &signature_);
}

void MachineCollective::reduce(std::span<const std::byte* const> sources, std::byte* destination, std::size_t count,
                               ReduceOp op) const {
  shm::reduce({.sources = sources,
               .destinations = std::span(&destination, 1),
               .count = count,
               .divisor = hierarchy_.topology.ranks()},
              call_.dtype, op);
}

std::byte* MachineCollective::grown(shm::Memory& memory, std::size_t bytes) {
  if (memory.size() < bytes) memory = hierarchy_.inside->allocate(bytes);
  return memory.data();
}

}  // namespace lockstep
