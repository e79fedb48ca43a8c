// SPDX-License-Identifier: Apache-2.0
// agent/meet/channel.h: a stream of bytes to one peer, over a socket that does not block.
//
// Flow:    packet_stream.h -> here -> the socket
// Owns:    the socket
// Threads: one at a time
#pragma once

#include <cstddef>
#include <optional>
#include <span>

#include "lockstep/base/files/unique_fd.h"

namespace lockstep {

class Channel {
 public:
  explicit Channel(UniqueFd fd);  // makes it one that does not block
  virtual ~Channel() = default;
  Channel& operator=(Channel&&) = delete;

  // How many bytes were moved; 0: none for now; nothing: the peer is gone.
  virtual std::optional<size_t> read(std::span<char> room);
  virtual std::optional<size_t> write(std::span<const char> bytes);

  // Returns what poll() has to wait for before the next read(), or, if `has_to_write`, the next write().
  virtual short events(bool has_to_write) const;

  int fd() const { return fd_.get(); }

 private:
  UniqueFd fd_;
};

}  // namespace lockstep
