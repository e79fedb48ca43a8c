// SPDX-License-Identifier: Apache-2.0
// launch/peer_link.h: lines of text to and from another launcher, for a loop that must never wait for one of them.
//
// Flow:    machines.h -> here -> channel.h
// Owns:    the channel
// Threads: one
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "lockstep/deadline.h"
#include "lockstep/launch/channel.h"

namespace lockstep {

class PeerLink {
 public:
  explicit PeerLink(std::unique_ptr<Channel> channel) : channel_(std::move(channel)) {}
  PeerLink(PeerLink&&) = default;
  PeerLink& operator=(PeerLink&&) = default;
  ~PeerLink();  // the other end learns of it, even if a child of this process has the socket, too

  void write(const std::string& line) { out_ += line + '\n'; }
  void move();  // what can be sent and received at once

  // The next line that has come whole.
  std::optional<std::string> take();

  // Says that no more comes, and throws away what the other end has said: what is not read when a socket is closed
  // makes the kernel take back what was sent. False: the other end has closed, too.
  void say_end();
  bool drain();

  // No more is read, and the link is gone once everything is sent.
  void finish() { finishing_ = true; }
  bool is_gone() const { return gone_ || (finishing_ && out_.empty()); }

  int fd() const { return channel_->fd(); }
  short events() const { return channel_->events(/*has_to_write=*/!out_.empty()); }

 private:
  std::unique_ptr<Channel> channel_;
  std::string in_{};
  std::string out_{};
  bool gone_ = false;
  bool finishing_ = false;
};

}  // namespace lockstep
