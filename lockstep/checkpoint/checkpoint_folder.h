// SPDX-License-Identifier: Apache-2.0
// checkpoint/checkpoint_folder.h: the checkpoints of a run: the newest few are kept, a damaged one is passed over.
//
// Flow:    train/ -> TensorFile -> DIR/step-00000470.safetensors -> --resume
// Owns:    the files step-*.safetensors in its folder
// Threads: one thread
// Ranks:   only rank 0 has one
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/checkpoint.h"
#include "lockstep/checkpoint/safetensors.h"

namespace lockstep {

class CheckpointFolder {
 public:
  // Makes the folder if it is missing, tries to write in it (an error now is better than after the first epoch), and
  // removes what a killed writer left half-written. Throws CheckpointError.
  explicit CheckpointFolder(std::filesystem::path folder, int keep = 2);

  // Writes the checkpoint of `step` atomically, then removes the older ones beyond `keep`, and later ones, which a run
  // that was resumed from an earlier step has left. If writing fails, all files stay as they are. Throws SystemError.
  // fetch: as for save_safetensors().
  void save(std::int64_t step, const TensorFile& file, const FetchTensor& fetch = nullptr);

  bool empty() const { return newest_first().empty(); }

  struct Loaded {
    std::filesystem::path path;
    SafetensorsReader file;  // whole and verified
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
