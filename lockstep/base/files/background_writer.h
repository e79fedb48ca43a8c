// SPDX-License-Identifier: Apache-2.0
// base/files/background_writer.h: writes records to a file from a thread of its own, so that a slow disk delays nobody: records
// that it cannot take in time are dropped and counted.
//
// Flow:    offer() -> a bounded queue -> the writer's thread -> the file
// Owns:    the file and the thread. Where the disk does not answer finish() in time, the thread is left behind, with what
//          it uses, and ends when the disk answers
// Threads: any thread offers; the thread that made it finishes and destroys it
// Ranks:   no communication
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "lockstep/base/files/unique_fd.h"

namespace lockstep {

struct BackgroundWriterOptions {
  size_t most_waiting = size_t{4} << 20;  // bytes: some 40,000 points of a curve
  bool at_once = false;  // write each record as it comes; else about once a second, so that a step wakes no thread
};

class BackgroundWriter {
 public:
  // Writes to the end of `file`. `name`: of the file, for the log.
  BackgroundWriter(UniqueFd file, std::string name, const BackgroundWriterOptions& options = {});
  ~BackgroundWriter();  // as finish(), unless that was called
  BackgroundWriter& operator=(BackgroundWriter&&) = delete;

  // Takes a record, which is written whole or not at all, in the order of the calls. Drops it if
  // `most_waiting` bytes wait already. Never waits for the disk. The first drop is a warning in the log.
  void offer(std::string record);

  // With at_once: whether everything is written, for which it waits at most `timeout`. A process that is killed afterwards loses nothing.
  bool wait_until_written(std::chrono::milliseconds timeout);

  // Waits until everything is written, at most `timeout`; then gives up the rest. Logs how many records were dropped, if
  // any, and returns it. Nothing may be offered afterwards.
  int64_t finish(std::chrono::milliseconds timeout = std::chrono::seconds(5));

 private:
  struct Shared;
  std::shared_ptr<Shared> shared_;  // with the thread
  bool finished_ = false;
};

}  // namespace lockstep
