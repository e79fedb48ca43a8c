// SPDX-License-Identifier: Apache-2.0
// train/reports/metrics.h: what a run reports: one JSON object a line, each written as it comes, in the format of the README; and
// what it says beside its steps: how it was started, where it ran, and what each rank took.
//
// Flow:    train/loop.h -> here -> base/files/background_writer.h -> the file of --metrics, a pipe to the command of --on-event
// Threads: one thread; a disk that is full or slow loses events and does not delay it
// Ranks:   rank 0 writes; on the others every call does nothing
#pragma once

#include <memory>
#include <string>

#include <nlohmann/json.hpp>

#include "lockstep/base/files/background_writer.h"
#include "lockstep/strategy.h"
#include "lockstep/train/options/options.h"
#include "lockstep/world.h"

namespace lockstep {

class EventCommand;

class MetricsFile {
 public:
  MetricsFile() = default;  // writes nothing

  // append: on a line of its own, also where the last one is cut off. Throws SystemError: the file can't be opened.
  MetricsFile(const std::string& path, bool append);

  // To the stdin of this command (--on-event), from now on. It has nothing of ours but stdout and stderr, and a group of its own:
  // neither Ctrl-C nor the launcher's signals end it before its stdin does. If it does not start, a warning says why.
  void pass_on_to(const std::string& command);

  // NaN and infinity become null. The first event that is lost is a warning in the log.
  void write(const Json& event);

  // Before the state of a run is kept for others that go on with it: they find all events before it in the file. Waits for a
  // slow disk 0.1 s in the whole run, and then no more.
  void hand_over();

  // Waits until everything is written, at most 5 s, then closes the command's stdin and waits as long for its end: a
  // warning says that it has failed, or still runs and is left alone. False: events are not in the file, and a warning in
  // the log says how many.
  bool finish();
  void require_written();  // the same; throws SystemError in place of false

 private:
  std::string path_;
  std::unique_ptr<BackgroundWriter> writer_;
  std::shared_ptr<EventCommand> command_;
  std::chrono::nanoseconds waited_{0};  // for a slow disk
};

inline constexpr int kMetricsFormat = 1;  // raised when a reader of the old one would misunderstand the new one

// The arguments as a shell takes them: `program --data "a b"` with single quotes where they are needed.
std::string command_of(int argc, const char* const* argv);

// The first event of a run, and of each time that it is resumed: format, next step, command, launcher, machine (name,
// processor, cores, memory), all settings.
Json start_event(const TrainOptions& options, int64_t step);

// Seconds of each phase, and of waiting for data, added up over the steps; memory of the process at the end of the run:
// its share of what it has in memory (PSS), and the most it has had, with all that it shares.
// Ranks:  all of `together` call it. Blocks.
Json facts_of_each_rank(const World& together, const World& world, const PhaseTimes& phases, double data_seconds);

}  // namespace lockstep
