// SPDX-License-Identifier: Apache-2.0
// gather between machines: each rank sends its part straight to root, in one round. A rank other than root sends its
// part, root nothing.
#include "lockstep/collective/machines/collectives.h"

namespace lockstep {

void gather(Hierarchy& hierarchy, const Call& call) {
  check_all_ranks(hierarchy, call);
  const PartCounts parts = counts_of(call, hierarchy.all.size());
  PartCounts send(parts.size());
  send[call.root] = parts[hierarchy.rank];
  exchange(hierarchy, call, send, hierarchy.rank == call.root ? parts : PartCounts(parts.size()));
}

}  // namespace lockstep
