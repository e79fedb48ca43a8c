// SPDX-License-Identifier: Apache-2.0
// train/metrics.h: what a run reports: one JSON object a line, flushed per line, in the format of the README.
//
// Flow:    train/loop.h -> here -> the file of --metrics
// Threads: one thread
// Ranks:   rank 0 writes; on the others every call does nothing
#pragma once

#include <fstream>
#include <string>

#include <nlohmann/json.hpp>

#include "lockstep/error.h"

namespace lockstep {

using Json = nlohmann::ordered_json;  // NaN and infinity are written as null

class MetricsFile {
 public:
  MetricsFile() = default;  // writes nothing

  // Both throw SystemError.
  MetricsFile(const std::string& path, bool append)
      : path_(path), out_(path, append ? std::ios::app : std::ios::trunc) {
    require_written();
  }
  void write(const Json& event) {
    if (path_.empty()) return;
    out_ << event.dump() << '\n' << std::flush;
    require_written();
  }

 private:
  void require_written() const {
    if (!out_) throw system_error("write the metrics to", path_);
  }

  std::string path_;
  std::ofstream out_;
};

}  // namespace lockstep
