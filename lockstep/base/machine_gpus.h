// SPDX-License-Identifier: Apache-2.0
// base/machine_gpus.h: whether this machine has GPUs, whatever this program was built with.
//
// Threads: any
#pragma once

#include <algorithm>
#include <cctype>
#include <filesystem>
#include <string>
#include <string_view>

namespace lockstep {

// Whether NVIDIA's driver has made a file nvidiaN for a GPU. A container may see any one of them.
inline bool machine_has_gpus(const std::filesystem::path& folder = "/dev") {
  constexpr std::string_view kPrefix = "nvidia";
  std::error_code no_folder;
  for (const auto& file : std::filesystem::directory_iterator(folder, no_folder)) {
    const std::string name = file.path().filename().string();
    if (!name.starts_with(kPrefix) || name.size() == kPrefix.size()) continue;
    const auto is_digit = [](unsigned char c) { return std::isdigit(c) != 0; };
    if (std::all_of(name.begin() + kPrefix.size(), name.end(), is_digit)) return true;
  }
  return false;
}

}  // namespace lockstep
