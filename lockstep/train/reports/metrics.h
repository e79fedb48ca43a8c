// SPDX-License-Identifier: Apache-2.0
// train/reports/metrics.h: what a run reports: one JSON object a line, each written as it comes, in the format of the README.
//
// Flow:    train/loop.h -> here -> base/files/background_writer.h -> the file of --metrics, the command of --on-event
// Threads: one thread; a disk that is full or slow loses events and does not delay it
// Ranks:   rank 0 writes; on the others every call does nothing
#pragma once

#include <memory>
#include <string>

#include <nlohmann/json.hpp>

#include "lockstep/base/files/background_writer.h"
#include "lockstep/train/reports/event_command.h"

namespace lockstep {

using Json = nlohmann::ordered_json;  // NaN and infinity are written as null

class MetricsFile {
 public:
  MetricsFile() = default;  // writes nothing

  // append: on a line of its own, also where the last one is cut off. Throws SystemError: the file can't be opened.
  MetricsFile(const std::string& path, bool append);

  // To the command of --on-event, from now on.
  void pass_on_to(const std::string& command) { command_ = std::make_unique<EventCommand>(command); }

  void write(const Json& event);  // the first that is lost is a warning in the log

  // Before the state of a run is kept for others that go on with it: they find all events before it in the file. Waits for a
  // slow disk 0.1 s in the whole run, and then no more.
  void hand_over();

  // Waits until everything is written, at most 5 s, then as long for the command. False: events are not in the file, and a
  // warning in the log says how many.
  bool finish();
  void require_written();  // the same; throws SystemError in place of false

 private:
  std::string path_;
  std::unique_ptr<BackgroundWriter> writer_;
  std::unique_ptr<EventCommand> command_;
  std::chrono::nanoseconds waited_{0};  // for a slow disk
};

}  // namespace lockstep
