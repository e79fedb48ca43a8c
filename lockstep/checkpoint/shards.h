// SPDX-License-Identifier: Apache-2.0
// checkpoint/shards.h: a large checkpoint as several safetensors files and an index, in Hugging Face's form:
//
//   step-00000470-00001-of-00002.safetensors …   each a file of its own, with the metadata and a checksum
//   step-00000470.safetensors.index.json         {"metadata": {"total_size": bytes}, "weight_map": {name: file}}
//
// The index is written last and removed first: without it there is no checkpoint. Where the index that is there names these
// files, the step is being saved again, and the new ones are step-00000470-again-00001-of-00002.safetensors …
//
// Threads: any
// Ranks:   no communication; the files do not depend on the number of ranks
#pragma once

#include <cstddef>
#include <filesystem>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "lockstep/checkpoint/safetensors.h"

namespace lockstep {

inline constexpr const char* kIndexSuffix = ".safetensors.index.json";

// Shards in the order of the names, each of at most `most_bytes` or of one tensor; one file if all fit. Tensors are not copied.
std::vector<TensorFile> split_into_shards(const TensorFile& file, std::size_t most_bytes);

// "step-00000470" -> "step-00000470-00001-of-00002.safetensors"; i: from 0.
std::string shard_name(const std::string& stem, std::size_t i, std::size_t shards);

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
  std::map<std::string, std::size_t> file_of_;
};

}  // namespace lockstep
