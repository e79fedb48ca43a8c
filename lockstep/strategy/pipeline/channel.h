// strategy/pipeline/channel.h: a bounded queue from one device's thread to another's.
//
// Owns:    what lies in it
// Threads: one sender, one receiver, each a Device
// Ranks:   inside one process
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/devices.h"

namespace lockstep {

template <class Value>
class Channel {
 public:
  explicit Channel(std::size_t capacity) : places_(capacity) {}

  // Blocks while the channel is full. Throws PeerLost, as Device::wait does.
  void send(Device& from, Value value) {
    const std::uint32_t sent = sent_.load();
    from.wait(taken_, "room in a channel", [&] { return sent - taken_.load() < places_.size(); });
    places_[sent % places_.size()] = std::move(value);
    sent_.raise(sent + 1);
  }

  // Blocks while the channel is empty. The place is free once its value was taken out. Throws PeerLost.
  Value receive(Device& at) {
    const std::uint32_t taken = taken_.load();
    at.wait(sent_, "what another stage sends", [&] { return sent_.load() != taken; });
    Value value = std::exchange(places_[taken % places_.size()], Value());
    taken_.raise(taken + 1);
    return value;
  }

 private:
  std::vector<Value> places_;
  alignas(64) shm::Flag sent_;
  alignas(64) shm::Flag taken_;
};

}  // namespace lockstep
