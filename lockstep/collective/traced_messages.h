// SPDX-License-Identifier: Apache-2.0
// collective/traced_messages.h: a message in a trace: a span at each end, and a flow from one to the other.
//
// Flow:    world_state.h, c10d/backend.h -> here -> observe/trace.h
// Owns:    a count of the messages of each of the last 1024 channels (tags) of a group. Nothing is sent for it: both ends
//          count them, and messages of a channel arrive in the order in which they were sent
// Threads: any
// Ranks:   no communication
#pragma once

#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <tuple>

#include "lockstep/base/hash.h"
#include "lockstep/base/int_vector.h"
#include "lockstep/collective/calls/call.h"
#include "lockstep/observe/trace.h"

namespace lockstep {

uint64_t mix_numbers(auto... numbers) {
  const std::array all{static_cast<uint64_t>(numbers)...};
  return hash_of({reinterpret_cast<const char*>(all.data()), sizeof all});
}

// The ranks of a world or of a process group, whose messages a trace shows.
class MessageGroup {
 public:
  uint64_t id = 0;        // the same on all ranks of this group, another one in others
  int rank = 0;           // this one in the group
  IntVector<int> in_job;  // the rank in the job of each rank

  // The flow of the next message: the same number at both ends, and never 0.
  uint64_t next_flow(const Call& message, int peer) {
    const bool sends = message.operation == Operation::kSend;
    const Channel channel{sends ? rank : peer, sends ? peer : rank, message.tag};
    const std::lock_guard lock(mutex_);
    const auto [count, is_new] = counts_.try_emplace(channel);
    if (is_new) order_.push_back(channel);
    const auto& [from, to, tag] = channel;
    const uint64_t flow = mix_numbers(id, from, to, tag, count->second++) | 1U;
    if (order_.size() > kChannels) {
      counts_.erase(order_.front());
      order_.pop_front();
    }
    return flow;
  }

 private:
  using Channel = std::tuple<int, int, int64_t>;  // from, to, tag
  static constexpr size_t kChannels = 1024;

  std::mutex mutex_;
  std::map<Channel, uint64_t> counts_;
  std::deque<Channel> order_;
};

// A message that is about to be started.
class TracedMessage {
 public:
  TracedMessage(std::shared_ptr<MessageGroup> group, const Call& message)
      : group_(std::move(group)), message_(message) {
    if (is_message(message.operation) && message.peer != kAnyRank) flow_ = group_->next_flow(message, message.peer);
  }

  // Writes a span from `began`, which was trace::now_if_recording(). source: of a receive, the rank that has sent it.
  void write(int64_t began, int source) {
    const int peer = message_.peer == kAnyRank ? source : message_.peer;
    if (flow_ == 0) flow_ = group_->next_flow(message_, peer);
    trace::write(began, [&] {
      return trace::Event{.name = to_string(message_.operation),
                          .number = group_->in_job[peer],
                          .bytes = to_int64(message_.count * size_of(message_.dtype)),
                          .flow = flow_,
                          .arrives = message_.operation == Operation::kReceive};
    });
  }

 private:
  std::shared_ptr<MessageGroup> group_;
  Call message_;
  uint64_t flow_ = 0;
};

}  // namespace lockstep
