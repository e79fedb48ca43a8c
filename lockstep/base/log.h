// base/log.h: one line to stderr when something worth knowing changed. Results go to stdout, not here.
//
// Owns:    the process's logger (spdlog), made at first use
// Threads: any
// Ranks:   no communication; each line carries the rank once set_log_rank was called
#pragma once

#include <string>

namespace lockstep {

enum class LogLevel { kDebug, kInfo, kWarning, kError, kOff };

void set_log_level(LogLevel level);  // LOCKSTEP_LOG=debug|info|warning|error|off decides until this is called
void set_log_rank(int rank, int world_size);

void log_debug(const std::string& line);
void log_info(const std::string& line);
void log_warning(const std::string& line);
void log_error(const std::string& line);

}  // namespace lockstep
