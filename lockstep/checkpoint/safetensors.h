// checkpoint/safetensors.h: reads and writes the safetensors format, so that any tool of the field can open a
// checkpoint.
//
// The format (github.com/huggingface/safetensors): the header's length as 8 bytes little-endian, the header as JSON
// (name -> dtype, shape, data_offsets; strings under "__metadata__"), then the tensors' bytes. No code is ever run when
// one is read, unlike with pickle. lockstep adds a checksum of the whole file to the metadata ("lockstep.xxh3").
//
// Threads: any, on different files
// Ranks:   no communication
#pragma once

#include <torch/types.h>

#include <filesystem>
#include <map>
#include <string>

namespace lockstep {

struct TensorFile {
  std::map<std::string, torch::Tensor> tensors;  // CPU, contiguous when read
  std::map<std::string, std::string> metadata;
};

// tensors: any layout and device. Throws UsageError for a dtype that the format does not know.
std::string to_safetensors(const TensorFile& file);

// Other tools write no checksum; lockstep's own files always have one.
enum class Checksum { kRequired, kOptional };

// Every length and offset is checked before it is believed.
// Throws CheckpointError naming `origin` and what is wrong with it.
TensorFile from_safetensors(const std::string& bytes, const std::string& origin,
                            Checksum checksum = Checksum::kOptional);

// Atomically, see base/file.h. Throws SystemError.
void save_safetensors(const std::filesystem::path& path, const TensorFile& file);
TensorFile load_safetensors(const std::filesystem::path& path, Checksum checksum = Checksum::kOptional);

}  // namespace lockstep
