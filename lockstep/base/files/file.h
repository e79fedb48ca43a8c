// SPDX-License-Identifier: Apache-2.0
// base/files/file.h: writes files atomically: a reader sees the old file or the whole new one, even after a crash.
//
// Threads: any, on different paths
// Ranks:   no communication; one rank writes a path
#pragma once

#include <cstddef>
#include <filesystem>
#include <memory>
#include <string>

#include "lockstep/base/files/unique_fd.h"

namespace lockstep {

// Writes to PATH.tmp- and 16 random hexadecimal digits: a new file, never through a link. commit() flushes to the disk and
// renames. Without commit() nothing is left behind.
// Every call throws SystemError naming the path: a full disk, no permission. After an error it can only be destroyed.
class AtomicFile {
 public:
  // kPastCache: goes to the disk from memory of its own in large blocks (O_DIRECT) where the file system allows it. The kernel's
  // copy into its cache takes a core that the training wants: on a virtual machine six times the time that the disk takes.
  enum class Way { kThroughCache, kPastCache };

  explicit AtomicFile(std::filesystem::path path, Way way = Way::kThroughCache);
  ~AtomicFile();
  AtomicFile& operator=(AtomicFile&&) = delete;

  void write(const void* data, size_t bytes);
  void overwrite(size_t at, const void* data, size_t bytes);  // what was written before
  void commit();                                              // blocks until file and folder are on the disk

 private:
  void put(const void* data, size_t bytes);
  void put_block();
  void put_rest();

  struct Block;
  std::filesystem::path path_;
  std::filesystem::path temporary_;
  UniqueFd fd_;
  std::unique_ptr<Block> block_;  // null: through the cache
  size_t filled_ = 0;
};

void make_folder(const std::filesystem::path& path);  // with those above it; throws SystemError
void write_file(const std::filesystem::path& path, const std::string& content);  // through an AtomicFile
std::string read_file(const std::filesystem::path& path);

// Reads parts of a file. Every call throws SystemError naming the path.
class ReadableFile {
 public:
  explicit ReadableFile(std::filesystem::path path);
  size_t size() const { return size_; }
  void read(size_t at, void* into, size_t bytes) const;

 private:
  std::filesystem::path path_;
  UniqueFd fd_;
  size_t size_ = 0;
};

}  // namespace lockstep
