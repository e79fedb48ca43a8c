// SPDX-License-Identifier: Apache-2.0
// checkpoint/safetensors.h: the bytes of a safetensors file; see lockstep/checkpoint.h. A file is written and read tensor
// by tensor, so it may be larger than memory.
//
// Threads: any
// Ranks:   no communication
#pragma once

#include <xxhash.h>

#include <cstdint>
#include <functional>
#include <iomanip>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "lockstep/base/text.h"
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

// XXH3 (64 bits) of bytes that come in parts. Against accidents, not against attackers.
class Hash {
 public:
  Hash() : state_(XXH3_createState()) { XXH3_64bits_reset(state_.get()); }
  void add(const void* data, std::size_t bytes) { XXH3_64bits_update(state_.get(), data, bytes); }
  std::string digits() const {  // 16
    return concat(std::hex, std::setfill('0'), std::setw(16), XXH3_64bits_digest(state_.get()));
  }

 private:
  struct Frees {
    void operator()(XXH3_state_t* state) const { XXH3_freeState(state); }
  };
  std::unique_ptr<XXH3_state_t, Frees> state_;
};

// The error of a file that is damaged, and how.
CheckpointError damaged_file(const std::filesystem::path& origin, const std::string& what);

// Other tools write no checksum; lockstep's own files always have one.
// kTrusted: it is not verified: another rank of the job has done so.
enum class Checksum { kRequired, kOptional, kTrusted };

// The bytes of a file: in memory, or on the disk, or both.
struct ByteSource {
  std::size_t size = 0;
  std::function<void(std::size_t at, void* into, std::size_t bytes)> from_disk{};  // none: all are in memory
  std::shared_ptr<const std::byte> mapped{};

  void read(std::size_t at, void* into, std::size_t bytes) const;
};

// Mapped, so that all processes of a machine that read the file share the kernel's copy. read() reads it as usual: an error
// of the disk is a SystemError there, and SIGBUS in the mapping. Throws SystemError.
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
  const std::string& checksum() const { return checksum_; }  // as the file has it; empty: it has none

  // On the CPU, contiguous, not to be written to: of a mapped file it is the mapping, which the tensor keeps. Throws
  // SystemError.
  torch::Tensor read(const std::string& name) const;

 private:
  ByteSource source_;
  std::map<std::string, Entry> entries_;
  std::map<std::string, std::string> metadata_;
  std::string checksum_;
};

}  // namespace lockstep
