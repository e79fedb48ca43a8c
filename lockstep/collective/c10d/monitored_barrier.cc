// SPDX-License-Identifier: Apache-2.0

#include "lockstep/collective/c10d/backend_calls.h"

namespace lockstep::backend {
namespace {

constexpr int kBarrierTag = 0x3fffffff;  // the largest that a message between machines may have

Tensors a_byte() { return {torch::zeros({1}, torch::kUInt8)}; }

PeerLost barrier_without(const std::vector<int>& ranks, milliseconds timeout) {
  return PeerLost({.what = concat("Rank 0 timed out in monitoredBarrier after ", timeout.count(),
                                  " ms: ", ranks.size() == 1 ? "Rank " : "Ranks ", join(ranks, ", "),
                                  " failed to pass monitoredBarrier"),
                   .here = "rank 0 of the group",
                   .likely = "a rank that is stuck, slower than that, or makes other calls",
                   .next = "look at the output of those ranks"});
}

// All receives are there from the start, so after the deadline every rank that has come is still counted.
void hear_of_all_ranks(c10d::Backend& group, milliseconds timeout, bool all) {
  const Deadline deadline = Deadline::after(timeout);
  std::map<int, c10::intrusive_ptr<c10d::Work>> reports;
  for (int rank = 1; rank < group.getSize(); ++rank) {
    Tensors place = a_byte();
    reports[rank] = group.recv(place, rank, kBarrierTag);
  }
  std::vector<int> missing;
  for (const auto& [rank, report] : reports) try {
      report->wait(std::max(deadline.left(), milliseconds(1)));
    } catch (const PeerLost&) {
      if (!deadline.passed()) throw;  // not late: a rank is lost
      missing.push_back(rank);
      if (!all) break;
    }
  if (!missing.empty()) throw barrier_without(missing, timeout);
  Tensors byte = a_byte();
  for (const auto& [rank, report] : reports) group.send(byte, rank, kBarrierTag)->wait();
}

void report_to_rank_0(c10d::Backend& group) try {
  Tensors byte = a_byte(), answer = a_byte();
  group.send(byte, 0, kBarrierTag)->wait();
  group.recv(answer, 0, kBarrierTag)->wait();
} catch (const PeerLost& error) {
  throw PeerLost({.what = concat("Rank ", group.getRank(),
                                 " successfully reached monitoredBarrier, but received errors while waiting",
                                 " for send/recv from rank 0: ", error.text().what),
                  .here = concat("rank ", group.getRank(), " of the group"),
                  .likely = error.text().likely,
                  .next = "look at the output of rank 0: it names the ranks that did not come"});
}

}  // namespace

void monitored_barrier(c10d::Backend& group, milliseconds timeout, bool all) {
  group.getRank() == 0 ? hear_of_all_ranks(group, timeout, all) : report_to_rank_0(group);
}

}  // namespace lockstep::backend
