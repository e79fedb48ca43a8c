// SPDX-License-Identifier: Apache-2.0
// agent/start/output.h: what the ranks print, on its way through the launcher: whole lines, with the rank before them.
//
// Flow:    a rank's stdout or stderr -> pipe -> LineSplitter -> Sink -> this process's stdout or stderr
// Threads: one
#pragma once

#include <deque>
#include <functional>
#include <string>
#include <vector>

#include "agent/start/events.h"
#include "lockstep/base/files/unique_fd.h"

namespace lockstep {

constexpr size_t kLongestLine = 16 * 1024;  // a longer one is passed on in pieces
constexpr size_t kLastLines = 20;           // kept of every stream
constexpr size_t kMostPending = 1 << 20;    // bytes that a Sink keeps in memory

// Cuts a stream of bytes into lines, without their newline.
class LineSplitter {
 public:
  using OnLine = std::function<void(std::string_view line)>;

  void feed(std::string_view bytes, const OnLine& on_line);
  void finish(const OnLine& on_line);  // the last line, where it has no newline

 private:
  std::string rest_;
};

// Writes to a descriptor that it does not own. write_some() never blocks, so that signals are handled even if the reader has
// stopped (Ctrl-S, a pager). What that reader does not take is kept: kMostPending bytes in memory, the rest in a nameless
// temporary file. Lines of up to 4096 bytes stay whole when programs share the descriptor.
class Sink {
 public:
  explicit Sink(int fd);
  int fd() const { return terminal_ ? terminal_.get() : fd_; }
  bool empty() const { return pending_.empty(); }
  bool full() const { return !tail_.empty(); }  // that file has no room either: add nothing more
  void add(std::string_view text);
  void add_line(std::string_view prefix, std::string_view line);
  void write_some();  // call when poll says that fd() can be written to; throws SystemError
  void flush();       // blocks until the reader has taken everything, without a deadline

 private:
  bool add_to_file(std::string_view text);
  void refill();

  int fd_;
  UniqueFd terminal_;    // fd_, where that is one: poll says that it takes something, and a write of more would block
  std::string pending_;  // empty only if the rest is
  size_t written_ = 0;   // of pending_
  UniqueFd file_;        // what comes after pending_: bytes [read_, filed_)
  size_t read_ = 0;
  size_t filed_ = 0;
  std::string tail_;  // what comes after the file
};

// The ends at which this process passes the ranks' output on.
struct Sinks {
  Sink out{STDOUT_FILENO};
  Sink err{STDERR_FILENO};

  void add_events(std::vector<Event>& events);  // for the next poll_events()
  void flush();
};

// The reading end of one stream of one rank. Without a prefix its bytes are passed on as they come, not line by line. A launcher on
// host n1 prefixes already: "[n1] " makes "[n1 rank 2] " of its "[rank 2] ".
class RankStream {
 public:
  RankStream(std::string prefix, Sink& sink, bool is_launcher = false)
      : prefix_(std::move(prefix)), sink_(&sink), is_launcher_(is_launcher) {}

  UniqueFd open();  // returns the end to write to; throws SystemError
  int fd() const { return pipe_.get(); }
  void add_events(std::vector<Event>& events);  // for the next poll_events(): none while the sink is full
  void read_some();                             // what is there now, up to 64 KiB; closes at the end
  void drain();  // reads what a dead rank left, even if another process keeps the pipe open; then closes
  const std::deque<std::string>& last_lines() const { return last_lines_; }

 private:
  long read_once();
  void close();
  void pass_on(std::string_view line);

  UniqueFd pipe_;
  std::string prefix_;
  Sink* sink_;
  bool is_launcher_;
  LineSplitter lines_;
  std::deque<std::string> last_lines_;
};

std::vector<std::string> last_lines_of_file(const std::string& path);  // empty if it can't be read

}  // namespace lockstep
