// SPDX-License-Identifier: Apache-2.0
// launch/line_channel.h: lines of text through a channel.
//
// Flow:    node_meeting.h -> here -> channel.h
// Owns:    the channel
// Threads: one at a time
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "lockstep/deadline.h"
#include "lockstep/launch/channel.h"

namespace lockstep {

class LineChannel {
 public:
  static constexpr std::size_t kLongest = 256;

  explicit LineChannel(std::unique_ptr<Channel> channel, std::size_t longest = kLongest)
      : channel_(std::move(channel)), longest_(longest) {}

  // The next line, if all of it has come. Does not block.
  std::optional<std::string> take();

  // Block until the deadline at most. Nothing, false: the other end has gone, or the deadline has passed.
  std::optional<std::string> read(const Deadline& deadline);
  bool write(const std::string& line, const Deadline& deadline);

  bool is_lost() const { return lost_; }  // the other end has gone, was not let in, or sent a line that is too long
  int fd() const { return channel_->fd(); }
  short events() const { return channel_->events(/*has_to_write=*/false); }

 private:
  std::unique_ptr<Channel> channel_;
  std::size_t longest_;
  std::string come_;
  bool lost_ = false;
};

}  // namespace lockstep
