// SPDX-License-Identifier: Apache-2.0
// checkpoint/file_image.h: safetensors files in memory: what a checkpoint's writer has, so that training may go on.
//
// Flow:    TensorFile -> copy() at the speed of memory -> write() to the disk, later and from another thread
// Owns:    its memory, which it keeps for the next copy: fetching and clearing fresh pages takes time, too
// Threads: one at a time
// Ranks:   no communication
#pragma once

#include <cstddef>
#include <filesystem>
#include <span>
#include <string>
#include <vector>

#include "lockstep/checkpoint.h"

namespace lockstep {

std::size_t tensor_bytes(const TensorFile& file);  // of all its tensors together

// Copies a whole file, which begins with safetensors_head(), at the speed of memory.
void copy_file(const std::string& head, const TensorFile& file, std::byte* into);

class FileImage {
 public:
  FileImage() = default;
  ~FileImage();
  FileImage& operator=(FileImage&&) = delete;

  // Allocates memory for files of that many bytes and asks the kernel for its pages now, so that copy() need not wait
  // for them. Its previous content is lost. Throws SystemError: the cgroup or the machine has no room.
  void reserve(std::size_t bytes);

  // Copies the tensors of `files`, which have no meta tensors, to where they will lie in each. Throws SystemError, as
  // reserve() does; UsageError, for a dtype that the format does not know.
  void copy(const std::vector<TensorFile>& files);

  struct File {
    std::vector<std::string> names;  // of its tensors
    std::size_t begin = 0;           // in the image
    std::size_t bytes = 0;
    std::size_t tensor_bytes = 0;  // of these
  };
  const std::vector<File>& files() const { return files_; }

  // Computes the checksum of one file and writes it atomically. Blocks until it is on the disk. Throws SystemError; can be
  // called again.
  void write(const File& file, const std::filesystem::path& path);

 private:
  std::span<std::byte> memory_;
  std::vector<File> files_;
};

}  // namespace lockstep
