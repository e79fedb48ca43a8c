// checkpoint/checkpoint_folder.h: the checkpoints of a run: the newest few are kept, a damaged one is passed over.
//
// Flow:    train/ -> TensorFile -> DIR/step-00000470.safetensors -> --resume
// Owns:    the files step-*.safetensors in its folder
// Threads: one thread
// Ranks:   rank 0 alone has one
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <vector>

#include "lockstep/checkpoint/safetensors.h"

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
