// SPDX-License-Identifier: Apache-2.0
// collective/message_arrows.h: which send belongs to which receive, for the arrows in a trace. Nothing is sent for it: both
// ranks count the messages of a world between them, which arrive in the order in which they were sent.
//
// Owns:    a counter for each of the last 1024 channels (tags) of a world
// Threads: any
// Ranks:   no communication
#pragma once

#include <compare>
#include <cstdint>
#include <deque>
#include <map>
#include <mutex>

namespace lockstep {

// Well mixed (splitmix64).
inline std::uint64_t mix_numbers(std::uint64_t a, std::uint64_t b) {
  std::uint64_t mixed = a + 0x9e3779b97f4a7c15U * (b + 1);
  mixed = (mixed ^ (mixed >> 30U)) * 0xbf58476d1ce4e5b9U;
  mixed = (mixed ^ (mixed >> 27U)) * 0x94d049bb133111ebU;
  return mixed ^ (mixed >> 31U);
}

class MessageArrows {
 public:
  struct Channel {
    int from = 0;
    int to = 0;
    std::int64_t tag = 0;
    auto operator<=>(const Channel&) const = default;
  };

  // Of the next message: the same number at both ends, if `world` is; never 0.
  std::uint64_t next(std::uint64_t world, const Channel& channel) {
    const std::lock_guard lock(mutex_);
    const auto [place, is_new] = counts_.try_emplace(channel);
    if (is_new) make_room(channel);
    const std::uint64_t ends =
        mix_numbers(static_cast<std::uint64_t>(channel.from), static_cast<std::uint64_t>(channel.to));
    return mix_numbers(mix_numbers(mix_numbers(world, ends), static_cast<std::uint64_t>(channel.tag)),
                       place->second++) |
           1U;
  }

 private:
  void make_room(const Channel& added) {
    order_.push_back(added);
    if (order_.size() <= kChannels) return;
    counts_.erase(order_.front());
    order_.pop_front();
  }

  static constexpr std::size_t kChannels = 1024;
  std::mutex mutex_;
  std::map<Channel, std::uint64_t> counts_;
  std::deque<Channel> order_;
};

}  // namespace lockstep
