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
#include <string>
#include <vector>

#include "lockstep/checkpoint.h"

namespace lockstep {

// Gives the values of a tensor that is on the meta device in a TensorFile.
using FetchTensor = std::function<torch::Tensor(const std::string& name)>;

// As in lockstep/checkpoint.h. fetch: called for each meta tensor, in the order of the names, when its turn comes.
void save_safetensors(const std::filesystem::path& path, const TensorFile& file, const FetchTensor& fetch);

// Throws UsageError for a dtype that the format does not know.
std::string to_safetensors(const TensorFile& file);

// Other tools write no checksum; lockstep's own files always have one.
enum class Checksum { kRequired, kOptional };

// Every length and offset is checked before it is used. Throws CheckpointError naming `origin` and what is wrong.
TensorFile from_safetensors(const std::string& bytes, const std::string& origin,
                            Checksum checksum = Checksum::kOptional);

// Where the bytes of a file come from.
struct ByteSource {
  std::size_t size = 0;
  std::function<void(std::size_t at, void* into, std::size_t bytes)> read;
};
ByteSource bytes_in(const std::filesystem::path& path);  // throws SystemError

// An open file, whose tensors are read when they are asked for.
class SafetensorsReader {
 public:
  struct Entry {
    torch::ScalarType dtype;
    std::vector<std::int64_t> shape;
    std::size_t at = 0;  // its first byte
  };

  // Reads everything once, for the checksum. Throws as from_safetensors() does.
  SafetensorsReader(ByteSource source, const std::string& origin, Checksum checksum);

  const std::map<std::string, Entry>& entries() const { return entries_; }
  const std::map<std::string, std::string>& metadata() const { return metadata_; }
  torch::Tensor read(const std::string& name) const;  // on the CPU, contiguous. Throws SystemError

 private:
  ByteSource source_;
  std::map<std::string, Entry> entries_;
  std::map<std::string, std::string> metadata_;
};

}  // namespace lockstep
