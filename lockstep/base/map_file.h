// SPDX-License-Identifier: Apache-2.0
// base/map_file.h: a file's bytes as memory: all processes of a machine that map it share the kernel's copy.
//
// Threads: any
#pragma once

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <cstddef>
#include <filesystem>
#include <memory>

#include "lockstep/base/to_size.h"
#include "lockstep/base/unique_fd.h"

namespace lockstep {

// All of it, read-only, for as long as somebody holds it. Null where it can't be mapped, or does not have `bytes` bytes.
// An error of the disk is SIGBUS where the memory is read, and so is what another process cuts off later.
inline std::shared_ptr<const std::byte> map_file(const std::filesystem::path& path, std::size_t bytes) {
  const UniqueFd file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  struct stat status {};
  if (!file || bytes == 0 || ::fstat(file.get(), &status) != 0 || to_size(status.st_size) != bytes) return nullptr;
  void* const memory = ::mmap(nullptr, bytes, PROT_READ, MAP_SHARED, file.get(), 0);
  if (memory == MAP_FAILED) return nullptr;
  return {static_cast<const std::byte*>(memory),
          [bytes](const std::byte* mapped) { ::munmap(const_cast<std::byte*>(mapped), bytes); }};
}

}  // namespace lockstep
