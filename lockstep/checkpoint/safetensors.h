// SPDX-License-Identifier: Apache-2.0
// checkpoint/safetensors.h: the bytes of a safetensors file; see lockstep/checkpoint.h. A file is written and read tensor
// by tensor, so it may be larger than memory.
//
// Threads: any
// Ranks:   no communication
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "lockstep/checkpoint.h"
#include "lockstep/error.h"

namespace lockstep {

// Gives the values of a tensor that is on the meta device in a TensorFile.
using FetchTensor = std::function<torch::Tensor(const std::string& name)>;

// Saves as in lockstep/checkpoint.h. fetch: called for each meta tensor, in the order of the names, when its turn comes.
void save_safetensors(const std::filesystem::path& path, const TensorFile& file, const FetchTensor& fetch);

// The file up to the first tensor's bytes, with zeros for the checksum. The tensors follow in the order of their names,
// without gaps. Throws UsageError for a dtype that the format does not know, and for names that it has for itself.
std::string safetensors_head(const TensorFile& file);

std::size_t tensor_bytes(const TensorFile& file);  // of all its tensors together

// Copies a whole file, which begins with safetensors_head(), at the speed of memory.
void copy_file(const std::string& head, const TensorFile& file, std::byte* into);

// The error of a file that is damaged, and how.
CheckpointError damaged_file(const std::filesystem::path& origin, const std::string& what);

// Other tools write no checksum; lockstep's own files always have one.
// kTrusted: it is not verified: memory of the launcher's.
enum class Checksum { kRequired, kOptional, kTrusted };

// The bytes of a file: in memory, or on the disk.
struct ByteSource {
  std::size_t size = 0;
  std::function<void(std::size_t at, void* into, std::size_t bytes)> from_disk{};  // none: all are in memory
  std::shared_ptr<const std::byte> mapped{};

  void read(std::size_t at, void* into, std::size_t bytes) const;
};

// Not mapped: an error of the disk would be SIGBUS. Throws SystemError.
ByteSource bytes_in(const std::filesystem::path& path);

// An open file, whose tensors are read when they are asked for.
class SafetensorsReader {
 public:
  struct Entry {
    torch::ScalarType dtype;
    std::vector<std::int64_t> shape;
    std::size_t at = 0;  // its first byte
  };

  // Reads everything once, for the checksum, unless that is trusted. Every length and offset is checked before it is used.
  // Throws CheckpointError naming `origin` and what is wrong.
  SafetensorsReader(ByteSource source, const std::string& origin, Checksum checksum);

  const std::map<std::string, Entry>& entries() const { return entries_; }
  const std::map<std::string, std::string>& metadata() const { return metadata_; }

  // On the CPU, contiguous. Of a file in memory it is that memory, which the tensor keeps: not to be written to. Throws
  // SystemError.
  torch::Tensor read(const std::string& name) const;

 private:
  ByteSource source_;
  std::map<std::string, Entry> entries_;
  std::map<std::string, std::string> metadata_;
};

}  // namespace lockstep
