// SPDX-License-Identifier: Apache-2.0
// collective/traced_messages.h: how a trace shows a message: a span at each end, and an arrow from one to the other.
//
// Flow:    world_state.h, c10d/backend.h -> here -> base/trace.h
// Owns:    a count of the messages of a group
// Threads: any
// Ranks:   no communication; both ends of a message count it
#pragma once

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "lockstep/base/to_size.h"
#include "lockstep/base/trace.h"
#include "lockstep/collective/calls/call.h"
#include "lockstep/collective/message_arrows.h"

namespace lockstep {

// rank: this one, and peer: the other one, in their group.
inline MessageArrows::Channel channel_of(const Call& message, int rank, int peer) {
  const bool sends = message.operation == Operation::kSend;
  return {sends ? rank : peer, sends ? peer : rank, message.tag};
}

// peer: the other rank, in the job.
inline trace::Label label_of_message(const Call& message, std::int64_t peer, std::uint64_t arrow) {
  return {.name = to_string(message.operation),
          .number = peer,
          .bytes = static_cast<std::int64_t>(message.count * size_of(message.dtype)),
          .arrow = arrow,
          .arrives = message.operation == Operation::kReceive};
}

// The ranks of a c10d group.
struct TracedGroup {
  std::uint64_t id = 0;              // the same on all ranks of this group, another one in others
  int rank = 0;                      // in this group
  std::vector<std::int64_t> in_job;  // of each rank: what it is in the job
  MessageArrows arrows{};
};

// A message of such a group, which is about to be started.
class TracedMessage {
 public:
  TracedMessage(std::shared_ptr<TracedGroup> group, const Call& message) : group_(std::move(group)), message_(message) {
    if (message_.peer != kAnyRank) find_arrow(message_.peer);
  }

  // A span from `began`, which was trace::now_if_recording(). peer: the other rank.
  void write(std::int64_t began, int peer) {
    if (arrow_ == 0) find_arrow(peer);
    trace::write(began, [&] { return label_of_message(message_, group_->in_job[to_size(peer)], arrow_); });
  }

 private:
  void find_arrow(int peer) { arrow_ = group_->arrows.next(group_->id, channel_of(message_, group_->rank, peer)); }

  std::shared_ptr<TracedGroup> group_;
  Call message_;
  std::uint64_t arrow_ = 0;
};

}  // namespace lockstep
