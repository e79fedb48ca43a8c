// SPDX-License-Identifier: Apache-2.0
// scatter between machines: root sends each rank its part, in one round. Root sends all parts but its own, other ranks
// nothing.
#include "lockstep/collective/machines/collectives.h"

namespace lockstep {

void scatter(Hierarchy& hierarchy, const Call& call) {
  check_all_ranks(hierarchy, call);
  const PartCounts parts = counts_of(call, hierarchy.all.size());
  PartCounts receive(parts.size());
  receive[call.root] = parts[hierarchy.rank];
  exchange(hierarchy, call, hierarchy.rank == call.root ? parts : PartCounts(parts.size()), receive);
}

}  // namespace lockstep
