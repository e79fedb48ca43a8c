// SPDX-License-Identifier: Apache-2.0
// launch/line_channel.h: lines of text through a channel, without waiting for the other end, or not beyond a deadline.
//
// Flow:    node_meeting.h, machines.h -> here -> channel.h
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
  static constexpr std::size_t kLongest = std::size_t{1} << 20;  // an epoch of thousands of machines

  explicit LineChannel(std::unique_ptr<Channel> channel, std::size_t longest = kLongest)
      : channel_(std::move(channel)), longest_(longest) {}
  LineChannel(LineChannel&&) = default;
  LineChannel& operator=(LineChannel&&) = default;
  ~LineChannel();  // the other end learns of it, even if a child of this process has the socket, too

  void write(const std::string& line) { out_ += line + '\n'; }
  void move();  // what can be sent and received at once

  // The next line that has come whole.
  std::optional<std::string> take();

  // Block until the deadline at most. Nothing, false: the other end has gone, or the deadline has passed.
  std::optional<std::string> read(const Deadline& deadline);
  bool write(const std::string& line, const Deadline& deadline);

  // Ends what this end sends; the other end then reads to the end.
  void say_end();
  // Throws away what has come: if a socket is closed with unread bytes, the kernel may drop what it has still to send.
  // Returns false once the other end has closed, too.
  bool drain();

  // No more is read, and the channel is gone once everything is sent.
  void finish() { finishing_ = true; }
  // The other end has gone, was not let in, or has sent too much.
  bool is_gone() const { return gone_ || (finishing_ && out_.empty()); }

  int fd() const { return channel_->fd(); }
  short events() const { return channel_->events(/*has_to_write=*/!out_.empty()); }

 private:
  std::unique_ptr<Channel> channel_;
  std::size_t longest_;
  std::string in_{};
  std::string out_{};
  bool gone_ = false;
  bool finishing_ = false;
};

}  // namespace lockstep
