// SPDX-License-Identifier: Apache-2.0
// data/formats/data_file.h: a file of a dataset, read where it is needed. It is not mapped: a mapped file that becomes
// shorter ends its readers (SIGBUS), or gives them zeros.
//
// Owns:    a descriptor
// Threads: const after construction
#pragma once

#include <cstdint>
#include <filesystem>
#include <span>
#include <vector>

#include "lockstep/base/files/unique_fd.h"

namespace lockstep {

namespace fs = std::filesystem;

class DataFile {
 public:
  explicit DataFile(fs::path path);  // throws DataError: missing, unreadable, not a regular file
  const fs::path& path() const { return path_; }
  uint64_t size() const { return size_; }  // when it was opened

  // Fills `into`, from `offset` on. Blocks for the disk. Throws DataError naming the file: it became shorter, or the disk
  // has an error.
  void read(uint64_t offset, std::span<uint8_t> into) const;
  std::vector<uint8_t> read_all() const;

  template <class T>
  T read_at(uint64_t offset) const {
    T value;
    read(offset, {reinterpret_cast<uint8_t*>(&value), sizeof value});
    return value;
  }

  // Starts reading this part from the disk without waiting for it. A part whose last byte is in the page cache is taken
  // as cached: asking the kernel for all of its pages would cost a fifth of reading them.
  void will_need(uint64_t offset, uint64_t bytes) const;

 private:
  fs::path path_;
  UniqueFd fd_;
  uint64_t size_ = 0;
};

}  // namespace lockstep
