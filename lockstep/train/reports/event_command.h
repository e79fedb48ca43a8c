// SPDX-License-Identifier: Apache-2.0
// train/reports/event_command.h: the command of --on-event, which reads the metrics' lines from its stdin.
//
// Flow:    train/reports/metrics.h -> base/files/background_writer.h -> a pipe -> sh -c COMMAND
// Owns:    the pipe's end. The process has a group of its own: neither Ctrl-C nor the launcher's signals end it before its stdin does
// Threads: one thread
// Ranks:   rank 0 has one
#pragma once

#include <memory>
#include <string>

#include "lockstep/base/files/background_writer.h"

namespace lockstep {

class EventCommand {
 public:
  // Starts it, with nothing of ours but stdout and stderr. If that fails, a warning says why, and the rest does nothing.
  explicit EventCommand(const std::string& command);
  ~EventCommand();  // closes its stdin. Blocks 0.1 s at most

  void offer(const std::string& line) {
    if (writer_) writer_->offer(line);
  }

  // Closes its stdin and waits for its end, 5 s in all. Warns of lines that were dropped, of a failure, and of a command that
  // still runs: it is left alone.
  void finish();

 private:
  std::unique_ptr<BackgroundWriter> writer_;
  int pid_ = -1;
};

}  // namespace lockstep
