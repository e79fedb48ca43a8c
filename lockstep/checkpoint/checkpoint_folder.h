// SPDX-License-Identifier: Apache-2.0
// checkpoint/checkpoint_folder.h: the checkpoints of a run: the newest few are kept, a damaged one is passed over. It removes
// nothing but older checkpoints, and files of saves that were not finished: by their whole names, which only lockstep makes.
//
// Flow:    train/ -> TensorFile -> DIR/step-00000470.safetensors -> --resume
// Owns:    a checkpoint's files (safetensors.h), and a lock on the folder: the file .lock, which also says who holds it
// Threads: one thread
// Ranks:   only rank 0 has one
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>

#include "lockstep/base/files/unique_fd.h"
#include "lockstep/checkpoint.h"
#include "lockstep/checkpoint/safetensors.h"

namespace lockstep {

struct LoadedCheckpoint {
  std::filesystem::path path;
  CheckpointReader file;  // whole and verified
};

// Reads `path`, a checkpoint's file or index; or of the folder `path` the checkpoint of `step`, or the newest that is whole. Changes
// nothing, and needs no lock: a training may go on there. Throws CheckpointError, SystemError.
LoadedCheckpoint find_checkpoint(const std::filesystem::path& path, std::optional<int64_t> step = std::nullopt);

class CheckpointFolder {
 public:
  static constexpr size_t kShardBytes = 5'000'000'000;  // a checkpoint above this becomes several files

  // Makes the folder if it is missing, tries to write in it (an error now is better than after the first epoch), locks
  // it for as long as this lives, and removes what a killed writer left half-written. Throws CheckpointError: also if
  // another process has it locked, on this machine or another, and says which. Where the file system has no locks
  // that is a warning.
  explicit CheckpointFolder(std::filesystem::path folder, int keep = 2, size_t shard_bytes = kShardBytes);

  // Throws CheckpointError if there was, when this was made, a checkpoint above `step` that load_newest() has not looked at.
  // Call it before save(). Does not touch the disk.
  void require_newest(int64_t step) const;

  // Writes the checkpoint of `step` atomically, shards included, then removes the older ones beyond `keep`, and renames later
  // ones as go_back() does. If writing fails, all checkpoints stay as they are. Throws SystemError. fetch: as for
  // save_safetensors(). Returns the path of the file, or of the index of several.
  std::filesystem::path save(int64_t step, const TensorFile& file, const FetchTensor& fetch = nullptr);

  // save() does not remove the checkpoint of this step.
  void keep_also(int64_t step) { also_ = step; }

  bool empty() const;

  // The newest checkpoint that is not damaged; a damaged one is named in a warning, and renamed to NAME.damaged. Nothing if
  // the folder has none. Throws CheckpointError if it has some, but all are damaged; SystemError if one can't be read. Then
  // all stay as they are.
  std::optional<LoadedCheckpoint> load_newest();

  // Makes `step` the newest: renames the files of later ones to NAME.after-STEP. Throws CheckpointError: that one is damaged,
  // or not there; then all stay as they are.
  void go_back(int64_t step);

  // Says that all checkpoints are those of the run that goes on here, from what it has in memory.
  void take_over() { unread_ = -1; }

 private:
  void remove_older(int64_t newest);
  void rename_later(int64_t newest);

  std::filesystem::path folder_;
  UniqueFd lock_;
  int keep_;
  size_t shard_bytes_;
  int64_t also_ = -1;    // kept, however old
  int64_t unread_ = -1;  // the newest step that this run has neither read nor written
};

}  // namespace lockstep
