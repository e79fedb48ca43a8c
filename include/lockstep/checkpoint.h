// lockstep/checkpoint.h: safetensors files, and the folder that keeps the newest checkpoints of a run.
#pragma once

#include <torch/types.h>

#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <vector>



// ---- reads and writes the safetensors format, so that any tool of the field can open a
// checkpoint.
//
// The format (github.com/huggingface/safetensors): the header's length as 8 bytes little-endian, the header as JSON
// (name -> dtype, shape, data_offsets; strings under "__metadata__"), then the tensors' bytes. No code is ever run when
// one is read, unlike with pickle. lockstep adds a checksum of the whole file to the metadata ("lockstep.xxh3").
//
// Threads: any, on different files
// Ranks:   no communication

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

// ---- the checkpoints of a run: the newest few are kept, a damaged one is passed over.
//
// Flow:    train/ -> TensorFile -> DIR/step-00000470.safetensors -> --resume
// Owns:    the files step-*.safetensors in its folder
// Threads: one thread
// Ranks:   rank 0 alone has one

namespace lockstep {

class CheckpointFolder {
 public:
  // Makes the folder if it is missing, proves that files can be written in it (and not only after the first epoch), and
  // removes what a killed writer left half-written. Throws CheckpointError.
  explicit CheckpointFolder(std::filesystem::path folder, int keep = 2);

  // Writes the checkpoint of `step` atomically, then removes the older ones beyond `keep`, and later ones: a run that
  // was resumed below them has left them behind. A failure to write leaves all as they are. Throws SystemError.
  void save(std::int64_t step, const TensorFile& file);

  bool empty() const { return newest_first().empty(); }

  struct Loaded {
    std::filesystem::path path;
    std::string bytes;  // whole and verified
  };
  // The newest checkpoint that is not damaged; a damaged one is named in a warning. Nothing if the folder has none.
  // Throws CheckpointError if it has some, but all of them are damaged.
  std::optional<Loaded> load_newest() const;

 private:
  std::vector<std::filesystem::path> newest_first() const;

  std::filesystem::path folder_;
  int keep_;
};

}  // namespace lockstep
