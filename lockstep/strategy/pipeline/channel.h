// SPDX-License-Identifier: Apache-2.0
// strategy/pipeline/channel.h: a bounded queue from one device's thread to another's.
//
// A ring of places and two counters: only the sender raises `sent_`, only the receiver raises `taken_`. Message k lies in
// place k % capacity. The sender fills it before it raises sent_ to k + 1 (release), and the receiver reads it after it
// has seen that (acquire); in the same way a place is filled again only after taken_ says that it was emptied.
//
// Owns:    what lies in it
// Threads: one sender, one receiver, each a Device
// Ranks:   inside one process
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "lockstep/strategy/devices/wait.h"

namespace lockstep {

template <class Value>
class Channel {
 public:
  explicit Channel(std::size_t capacity) : places_(capacity) {}

  // Blocks while the channel is full. Throws PeerLost.
  void send(Device& from, Value value) {
    const std::uint32_t sent = sent_.load();
    wait_on(from, taken_, "room in a channel", [&] { return sent - taken_.load() < places_.size(); });
    places_[sent % places_.size()] = std::move(value);
    sent_.raise(sent + 1);
  }

  // Blocks while the channel is empty. Throws PeerLost.
  Value receive(Device& at) {
    const std::uint32_t taken = taken_.load();
    wait_on(at, sent_, "what another stage sends", [&] { return sent_.load() != taken; });
    Value value = std::exchange(places_[taken % places_.size()], Value());
    taken_.raise(taken + 1);
    return value;
  }

 private:
  std::vector<Value> places_;
  alignas(64) shm::Flag sent_;   // messages sent so far
  alignas(64) shm::Flag taken_;  // messages taken so far
};

}  // namespace lockstep
