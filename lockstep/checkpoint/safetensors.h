// SPDX-License-Identifier: Apache-2.0
// checkpoint/safetensors.h: the bytes of a safetensors file; see lockstep/checkpoint.h. A file is written and read tensor
// by tensor, so it may be larger than memory. A large checkpoint is several files, each with the metadata and a checksum,
// and an index in Hugging Face's form: docs/design/checkpoints.md.
//
// Threads: any
// Ranks:   no communication; the files do not depend on the number of ranks
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <set>
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

size_t tensor_bytes(const TensorFile& file);  // of all its tensors together

// Copies a whole file, which begins with safetensors_head(), at the speed of memory.
void copy_file(const std::string& head, const TensorFile& file, std::byte* into);

// Other tools write no checksum; lockstep's own files always have one.
// kTrusted: it is not verified: memory of the launcher's.
enum class Checksum { kRequired, kOptional, kTrusted };

// The bytes of a file: in memory, or on the disk.
struct ByteSource {
  size_t size = 0;
  std::function<void(size_t at, void* into, size_t bytes)> from_disk{};  // none: all are in memory
  std::shared_ptr<const std::byte> mapped{};

  void read(size_t at, void* into, size_t bytes) const;
};

// An open file, whose tensors are read when they are asked for.
class SafetensorsReader {
 public:
  struct Entry {
    torch::ScalarType dtype;
    std::vector<int64_t> shape;
    size_t at = 0;  // its first byte
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

// ---- Shards

inline constexpr const char* kIndexSuffix = ".safetensors.index.json";

// Shards in the order of the names, each of at most `most_bytes` or of one tensor; one file if all fit. Tensors are not copied.
std::vector<TensorFile> split_into_shards(const TensorFile& file, size_t most_bytes);

// "step-00000470" -> "step-00000470-00001-of-00002.safetensors"; i: from 0.
std::string shard_name(const std::string& stem, size_t i, size_t shards);

std::string index_of_shards(const std::string& stem, const std::vector<TensorFile>& shards);  // its text

// The files that an index names. Throws SystemError; CheckpointError: it is damaged.
std::set<std::string> shards_in(const std::filesystem::path& index);

// A checkpoint: one file, or the shards of an index.
class CheckpointReader {
 public:
  // path: a .safetensors file or an index. Reads everything once, for the checksums, unless they are trusted. Throws
  // SystemError; CheckpointError: damaged, a shard is missing, or the index names a tensor that its shard does not have.
  CheckpointReader(const std::filesystem::path& path, Checksum checksum);

  const std::map<std::string, SafetensorsReader::Entry>& entries() const { return entries_; }
  const std::map<std::string, std::string>& metadata() const { return files_.front().metadata(); }
  torch::Tensor read(const std::string& name) const;  // as SafetensorsReader::read()

 private:
  void open_shards(const std::filesystem::path& index, Checksum checksum);

  std::vector<SafetensorsReader> files_;
  std::map<std::string, SafetensorsReader::Entry> entries_;
  std::map<std::string, size_t> file_of_;
};

}  // namespace lockstep
