// SPDX-License-Identifier: Apache-2.0
// base/log.h: one line to stderr when something worth knowing changed. Results go to stdout, not here.
//
// Owns:    the process's logger (spdlog), made at first use; its level is LOCKSTEP_LOG=debug|info|warning|error|off
// Threads: any
// Ranks:   no communication; each line carries the rank once set_log_rank was called
#pragma once

#include <string>

namespace lockstep {

void set_log_rank(int rank, int world_size);

void log_debug(const std::string& line);
void log_info(const std::string& line);
void log_warning(const std::string& line);

}  // namespace lockstep
