// SPDX-License-Identifier: Apache-2.0
// all_to_all between machines: each rank sends every other rank its part, in one round; (p-1)/p of its data, where parts
// are even. Where they are not, one more round before: an all_gather of what each rank sends to each, so that every rank
// knows what comes and no two sides of a message differ in size.
#include "lockstep/base/text.h"
#include "lockstep/collective/machines/collectives.h"

namespace lockstep {
namespace {

// table[r * p + s]: what rank r sends to rank s.
void check_counts(Hierarchy& hierarchy, const Call& call) {
  const std::size_t ranks = call.counts.size();
  hierarchy.scratch = std::make_unique_for_overwrite<std::byte[]>(ranks * ranks * sizeof(std::size_t));
  const auto* const table = reinterpret_cast<const std::size_t*>(hierarchy.scratch.get());
  all_gather(hierarchy, {.operation = Operation::kAllGather,
                         .input = call.counts.data(),
                         .output = hierarchy.scratch.get(),
                         .count = ranks,
                         .dtype = DType::kInt64});
  const std::size_t* sent_here = table + hierarchy.rank;
  for (std::size_t from = 0; from < ranks; ++from, sent_here += ranks)
    if (*sent_here != call.receive_counts[from])
      throw MismatchError({.what = concat("all_to_all: rank ", from, " sends ", *sent_here, " elements to rank ",
                                          hierarchy.rank, ", which expects ", call.receive_counts[from]),
                           .likely = "lists of rows that do not fit together",
                           .next = "leave receive_rows out: then they are exchanged"});
}

}  // namespace

void all_to_all(Hierarchy& hierarchy, const Call& call) {
  check_all_ranks(hierarchy, call);
  const PartCounts send = counts_of(call, hierarchy.all.size());
  if (!call.counts.empty()) check_counts(hierarchy, call);
  exchange(hierarchy, call, send, call.counts.empty() ? send : PartCounts(call.receive_counts));
}

}  // namespace lockstep
