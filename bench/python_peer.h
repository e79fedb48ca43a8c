// bench/python_peer.h: peers written in Python, run with the python3 and the PYTHONPATH of whoever runs the benchmark.
//
// Threads: call from the main thread while it is the only one (it forks)
#pragma once

#include <string>
#include <vector>

namespace lockstep::bench {

// Runs `script`, which stands beside this program, with one OpenMP thread per process, and returns what it writes to
// stdout. Blocks, at most 10 minutes. Throws SystemError: it failed (its message is on stderr), or did not end.
std::string run_python(const std::string& script, const std::vector<std::string>& arguments);

// Why python3 can't import these modules, such as "torch, numpy"; empty: it can.
std::string why_no_python(const std::string& modules);

}  // namespace lockstep::bench
