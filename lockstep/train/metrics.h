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

namespace lockstep {

using Json = nlohmann::ordered_json;  // NaN and infinity are written as null

class MetricsFile {
 public:
  MetricsFile() = default;                                     // writes nothing
  explicit MetricsFile(const std::string& path, bool append);  // throws SystemError
  void write(const Json& event);                               // throws SystemError

 private:
  std::string path_;
  std::ofstream out_;
};

}  // namespace lockstep
