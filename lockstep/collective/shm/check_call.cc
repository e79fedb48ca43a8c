#include "lockstep/collective/shm/check_call.h"

#include <set>

#include "lockstep/base/text.h"
#include "lockstep/collective/shm/reduce_kernels.h"
#include "lockstep/collective/shm/split.h"
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
  if (!counts.empty() && counts.size() != static_cast<std::size_t>(size))
    refuse(concat(counts.size(), " counts for ", size, " ranks"), "give one count per rank");
}

}  // namespace

void check_call(const Barrier&, int) {}
void check_call(const AllReduce& call, int) { check_op(call.dtype, call.op); }

void check_call(const Reduce& call, int size) {
  check_op(call.dtype, call.op);
  check_rank("root", call.root, size);
}

void check_call(const ReduceScatter& call, int size) {
  check_op(call.dtype, call.op);
  check_counts(call.counts, size);
}

void check_call(const AllGather& call, int size) { check_counts(call.counts, size); }
void check_call(const Broadcast& call, int size) { check_rank("root", call.root, size); }

void check_call(const Gather& call, int size) {
  check_counts(call.counts, size);
  check_rank("root", call.root, size);
}

void check_call(const Scatter& call, int size) {
  check_counts(call.counts, size);
  check_rank("root", call.root, size);
}

void check_call(const AllToAll& call, int size) {
  check_counts(call.send_counts, size);
  check_counts(call.receive_counts, size);
  if (call.send_counts.empty() != call.receive_counts.empty())
    refuse("all_to_all with one list of counts", "give send_counts and receive_counts, or neither");
  const bool even = call.send_counts.empty();
  const std::size_t sent = even ? call.count * static_cast<std::size_t>(size) : Split::uneven(call.send_counts).total();
  const std::size_t received =
      even ? call.count * static_cast<std::size_t>(size) : Split::uneven(call.receive_counts).total();
  const auto* const input = static_cast<const std::byte*>(call.input);
  const auto* const output = static_cast<const std::byte*>(call.output);
  if (input < output + received * size_of(call.dtype) && output < input + sent * size_of(call.dtype))
    refuse("all_to_all from memory into itself", "give it an output of its own");
}

void check_call(const Send& call, int size) { check_rank("to", call.to, size); }

void check_call(const Receive& call, int size) {
  if (call.from != kAnyRank) check_rank("from", call.from, size);
}

void check_subgroup(const std::vector<int>& ranks, int size) {
  if (ranks.empty()) refuse("a sub-group of no ranks", "name at least one");
  for (const int rank : ranks) check_rank("sub-group with rank", rank, size);
  if (std::set<int>(ranks.begin(), ranks.end()).size() != ranks.size())
    refuse("a sub-group that names a rank twice", "name each rank once");
}

}  // namespace lockstep::shm
