// SPDX-License-Identifier: Apache-2.0
#include "lockstep/train/metrics.h"

#include "lockstep/error.h"

namespace lockstep {

MetricsFile::MetricsFile(const std::string& path, bool append)
    : path_(path), out_(path, append ? std::ios::app : std::ios::trunc) {
  if (!out_) throw system_error("write the metrics to", path);
}

void MetricsFile::write(const Json& event) {
  if (path_.empty()) return;
  out_ << event.dump() << '\n' << std::flush;
  if (!out_) throw system_error("write the metrics to", path_);
}

}  // namespace lockstep
