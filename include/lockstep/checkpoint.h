// SPDX-License-Identifier: Apache-2.0
// lockstep/checkpoint.h: writes and reads safetensors files: tensors by name, and strings.
//
// Flow:    tensors and metadata -> TensorFile -> a file -> TensorFile, or any tool of the field
// Owns:    nothing
// Threads: any, on different files
// Ranks:   no communication; one rank writes, usually rank 0
#pragma once

#include <torch/types.h>

#include <filesystem>
#include <map>
#include <string>

namespace lockstep {

struct TensorFile {
  std::map<std::string, torch::Tensor> tensors;  // any layout and device; when read: CPU, contiguous
  std::map<std::string, std::string> metadata;
};

// The safetensors format (github.com/huggingface/safetensors): the header's length as 8 bytes little-endian, the header
// as JSON (name -> dtype, shape, data_offsets; strings under "__metadata__"), then the tensors' bytes. Reading one
// never runs code, unlike pickle. lockstep adds a checksum of the whole file to the metadata ("lockstep.xxh3"), and
// verifies it where there is one.
//
// save: atomic: a reader sees the old file or the whole new one. Blocks until it is on the disk. Throws SystemError;
// UsageError: a dtype that the format does not know, a tensor "__metadata__", or a key "lockstep.xxh3" of the caller's own.
// load: path: a file, or the index of several (*.safetensors.index.json, as large checkpoints of `lockstep train` and of
// Hugging Face's tools have). Every length and offset is checked before it is used. Throws SystemError; CheckpointError: damaged, and how.
void save_safetensors(const std::filesystem::path& path, const TensorFile& file);
TensorFile load_safetensors(const std::filesystem::path& path);

}  // namespace lockstep
