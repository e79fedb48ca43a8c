// collective/machines/inside_call.h: a Call in the words of shared memory's group.
//
// Threads: values
#pragma once

#include "lockstep/collective/call.h"
#include "lockstep/collective/shm/group.h"
#include "lockstep/collective/shm/memory/control_block.h"

namespace lockstep {

inline shm::Call inside_call(const Call& call) {
  switch (call.operation) {
    case Operation::kReduceScatter:
      return shm::ReduceScatter{call.input, call.output, call.count, call.counts, call.dtype, call.op};
    case Operation::kAllGather: return shm::AllGather{call.input, call.output, call.count, call.counts, call.dtype};
    case Operation::kBroadcast: return shm::Broadcast{call.output, call.count, call.dtype, call.root};
    case Operation::kAllToAll:
      return shm::AllToAll{call.input, call.output, call.count, call.counts, call.receive_counts, call.dtype};
    default: return shm::Barrier{};
  }
}

inline shm::Intent inside_signature(const Signature& signature) {
  return {signature.operation, signature.dtype, signature.op,         signature.algorithm,
          signature.root,      signature.count, signature.counts_hash};
}

}  // namespace lockstep
