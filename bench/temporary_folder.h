// bench/temporary_folder.h: a folder of its own, gone afterwards.
//
// Owns:    the folder and what is in it
// Threads: a value
#pragma once

#include <cstdlib>
#include <filesystem>
#include <string>
#include <system_error>

#include "lockstep/error.h"

namespace lockstep::bench {

class TemporaryFolder {
 public:
  TemporaryFolder() {
    std::string path = (std::filesystem::temp_directory_path() / "lockstep-bench-XXXXXX").string();
    if (::mkdtemp(path.data()) == nullptr) throw system_error("make a folder like", path);
    path_ = path;
  }
  ~TemporaryFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;

  std::string file(const std::string& name) const { return path_ / name; }

 private:
  std::filesystem::path path_;
};

}  // namespace lockstep::bench
