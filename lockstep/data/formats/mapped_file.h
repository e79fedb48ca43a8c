// SPDX-License-Identifier: Apache-2.0
// data/formats/mapped_file.h: a whole file as memory; the kernel reads a page when it is used. For data larger than memory.
//
// Owns:    the mapping and a descriptor. A file that shrinks while it is mapped ends the process (SIGBUS), as for every
//          program that maps it
// Threads: const after construction
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>

#include "lockstep/base/unique_fd.h"

namespace lockstep {

class MappedFile {
 public:
  explicit MappedFile(const std::filesystem::path& path);  // throws DataError: missing, unreadable, not a regular file
  const std::filesystem::path& path() const { return path_; }
  std::span<const std::uint8_t> bytes() const { return {data_.get(), data_.get_deleter().bytes}; }

  // Starts reading this part from the disk without waiting for it. A part whose last byte is in the page cache is taken
  // as cached: asking the kernel for all of its pages would cost a fifth of reading them.
  void will_need(std::size_t offset, std::size_t bytes) const;

 private:
  struct Unmap {
    std::size_t bytes;
    void operator()(const std::uint8_t* data) const;
  };

  std::filesystem::path path_;
  UniqueFd fd_;
  std::unique_ptr<const std::uint8_t, Unmap> data_;
};

}  // namespace lockstep
