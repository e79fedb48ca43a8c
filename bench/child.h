// bench/child.h: a child process that has to end by itself.
//
// Threads: any
#pragma once

#include <chrono>
#include <string>

#include "lockstep/launch/process.h"

namespace lockstep::bench {

// Blocks until it has ended. Throws SystemError naming it: it failed, or did not end in time.
void require_good_end(const Process& process, const std::string& name, std::chrono::milliseconds longest);

}  // namespace lockstep::bench
