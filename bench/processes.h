// SPDX-License-Identifier: Apache-2.0
// bench/processes.h: the child processes of a benchmark, and the folder they share.
//
// Owns:    a TemporaryFolder: the folder and what is in it
// Threads: call from the main thread while it is the only one (it forks)
#pragma once

#include <chrono>
#include <filesystem>
#include <list>
#include <string>
#include <vector>

#include "agent/start/process.h"

namespace lockstep::bench {

// A new folder inside `in`, removed with all it holds by the destructor. Throws SystemError.
class TemporaryFolder {
 public:
  explicit TemporaryFolder(const std::filesystem::path& in = std::filesystem::temp_directory_path());
  ~TemporaryFolder();
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;

  std::string file(const std::string& name) const { return path_ / name; }

 private:
  std::filesystem::path path_;
};

// The path of a file in the folder of this program, where its peers are installed.
std::string beside_this(const std::string& name);

// Blocks until all processes have exited with 0, and removes them from the list. Throws SystemError naming them: one
// of them failed, or they did not all end in time.
void wait_for_success(std::list<Process>& processes, const std::string& name, std::chrono::milliseconds timeout);

// The process's share of memory (PSS), in bytes; 0: it has ended.
double pss_bytes(int pid);

// Runs `script`, whose path is from the folder of this program, with the python3 and the PYTHONPATH of the caller and one
// OpenMP thread per process. Returns its stdout. Blocks, at most 10 minutes. Throws SystemError: it failed (its message
// is on stderr), or did not end.
std::string run_python(const std::string& script, const std::vector<std::string>& arguments);

// Why python3 can't import these modules, such as "torch, numpy"; empty: it can.
std::string why_no_python(const std::string& modules);

}  // namespace lockstep::bench
