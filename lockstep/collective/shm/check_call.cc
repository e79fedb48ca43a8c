// SPDX-License-Identifier: Apache-2.0
#include <set>
#include <utility>

#include "lockstep/base/text.h"
#include "lockstep/collective/shm/collectives.h"
#include "lockstep/collective/shm/partition.h"
#include "lockstep/collective/shm/reduce_kernels.h"
#include "lockstep/error.h"

namespace lockstep::shm {
namespace {

[[noreturn]] void refuse(const std::string& what, const std::string& next) {
  throw UsageError({.what = what, .next = next});
}

void check_op(DType dtype, ReduceOp op) {
  if (!defined(dtype, op))
    refuse(concat(to_string(op), " is not defined for ", to_string(dtype)), "convert the data, or choose another op");
}

void check_rank(const char* what, int rank, int size) {
  if (rank < 0 || rank >= size) refuse(concat(what, " ", rank, " of ", size, " ranks"), "name a rank of this group");
}

void check_counts(const std::vector<std::size_t>& counts, int size) {
  if (!counts.empty() && std::cmp_not_equal(counts.size(), size))
    refuse(concat(counts.size(), " counts for ", size, " ranks"), "give one count per rank");
}

void check_all_to_all(const Call& call, int size) {
  check_counts(call.receive_counts, size);
  if (call.counts.empty() != call.receive_counts.empty())
    refuse("all_to_all with one list of counts", "give the counts of both directions, or neither");
  const Partition sent = Partition::of(call, size);
  const Partition received = call.counts.empty() ? sent : Partition::uneven(call.receive_counts);
  const auto* const input = static_cast<const std::byte*>(call.input);
  const auto* const output = static_cast<const std::byte*>(call.output);
  const std::size_t element = size_of(call.dtype);
  if (input < output + received.total() * element && output < input + sent.total() * element)
    refuse("all_to_all from memory into itself", "give it an output of its own");
}

}  // namespace

void check_call(const Call& call, int size) {
  check_counts(call.counts, size);
  switch (call.operation) {
    case Operation::kAllReduce:
    case Operation::kReduceScatter: return check_op(call.dtype, call.op);
    case Operation::kReduce: check_op(call.dtype, call.op); [[fallthrough]];
    case Operation::kBroadcast:
    case Operation::kGather:
    case Operation::kScatter: return check_rank("root", call.root, size);
    case Operation::kAllToAll: return check_all_to_all(call, size);
    case Operation::kSend: return check_rank("to", call.peer, size);
    case Operation::kReceive:
      if (call.peer != kAnyRank) check_rank("from", call.peer, size);
      return;
    default: return;
  }
}

void check_subgroup(const std::vector<int>& ranks, int size) {
  if (ranks.empty()) refuse("a sub-group of no ranks", "name at least one");
  for (const int rank : ranks) check_rank("sub-group with rank", rank, size);
  if (std::set<int>(ranks.begin(), ranks.end()).size() != ranks.size())
    refuse("a sub-group that names a rank twice", "name each rank once");
}

}  // namespace lockstep::shm
