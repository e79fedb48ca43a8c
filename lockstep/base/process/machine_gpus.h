// SPDX-License-Identifier: Apache-2.0
// base/process/machine_gpus.h: whether this machine has GPUs, whatever this program was built with.
//
// Threads: any
#pragma once

#include <filesystem>
#include <regex>

namespace lockstep {

// Tells whether NVIDIA's driver has made a file nvidiaN for a GPU. A container may see any one of them.
inline bool machine_has_gpus(const std::filesystem::path& folder = "/dev") {
  std::error_code no_folder;
  for (const auto& file : std::filesystem::directory_iterator(folder, no_folder))
    if (std::regex_match(file.path().filename().string(), std::regex("nvidia[0-9]+"))) return true;
  return false;
}

}  // namespace lockstep
