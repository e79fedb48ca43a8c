// SPDX-License-Identifier: Apache-2.0
#include "lockstep/collective/c10d/backend_calls.h"

#include <algorithm>
#include <map>

#include "lockstep/base/text.h"
#include "lockstep/deadline.h"
#include "lockstep/error.h"

namespace lockstep::backend {
namespace {

Tensors a_byte() { return {torch::zeros({1}, torch::kUInt8)}; }

PeerLost missing_ranks(const std::vector<int>& ranks, milliseconds timeout) {
  return PeerLost({.what = concat("Rank 0 timed out in monitoredBarrier after ", timeout.count(),
                                  " ms: ", ranks.size() == 1 ? "Rank " : "Ranks ", join(ranks, ", "),
                                  " failed to pass monitoredBarrier"),
                   .here = "rank 0 of the group",
                   .likely = "a rank that is stuck, slower than that, or makes other calls",
                   .next = "look at the output of those ranks"});
}

}  // namespace

// All receives are there from the start, so after the deadline every rank that has come is still counted.
void hear_of_all_ranks(int size, milliseconds timeout, bool all, const StartMessage& send,
                       const StartMessage& receive) {
  const Deadline deadline = Deadline::after(timeout);
  std::map<int, c10::intrusive_ptr<c10d::Work>> reports;
  Tensors byte = a_byte();
  for (int rank = 1; rank < size; ++rank) {
    Tensors place = a_byte();
    reports[rank] = receive(place, rank);
  }
  std::vector<int> missing;
  for (const auto& [rank, report] : reports) try {
      report->wait(std::max(deadline.left(), milliseconds(1)));
    } catch (const PeerLost&) {
      if (!deadline.passed()) throw;  // not late: a rank is lost
      missing.push_back(rank);
      if (!all) break;
    }
  if (!missing.empty()) throw missing_ranks(missing, timeout);
  for (const auto& [rank, report] : reports) send(byte, rank)->wait();
}

void report_to_rank_0(int rank, const StartMessage& send, const StartMessage& receive) try {
  Tensors byte = a_byte();
  Tensors answer = a_byte();
  send(byte, 0)->wait();
  receive(answer, 0)->wait();
} catch (const PeerLost& error) {
  throw PeerLost(
      {.what = concat("Rank ", rank, " successfully reached monitoredBarrier, but received errors while waiting",
                      " for send/recv from rank 0: ", error.text().what),
       .here = concat("rank ", rank, " of the group"),
       .likely = error.text().likely,
       .next = "look at the output of rank 0: it names the ranks that did not come"});
}

}  // namespace lockstep::backend
