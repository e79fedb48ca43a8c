// SPDX-License-Identifier: Apache-2.0
// checkpoint/checkpoint_folder.h: the checkpoints of a run: the newest few are kept, a damaged one is passed over.
//
// Flow:    train/ -> TensorFile -> DIR/step-00000470.safetensors -> --resume
// Owns:    the files step-* in its folder (shards.h), and a lock on it: the file .lock, which also says who holds it
// Threads: one thread
// Ranks:   only rank 0 has one
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/base/unique_fd.h"
#include "lockstep/checkpoint.h"
#include "lockstep/checkpoint/file_image.h"
#include "lockstep/checkpoint/shards.h"

namespace lockstep {

class CheckpointFolder {
 public:
  static constexpr std::size_t kShardBytes = 5'000'000'000;  // a checkpoint above this becomes several files

  // Makes the folder if it is missing, tries to write in it (an error now is better than after the first epoch), locks
  // it for as long as this lives, and removes what a killed writer left half-written. Throws CheckpointError: also if
  // another process has it locked, on this machine or another, and says which. Where the file system has no locks
  // that is a warning.
  explicit CheckpointFolder(std::filesystem::path folder, int keep = 2, std::size_t shard_bytes = kShardBytes);

  // Writes the checkpoint of `step` atomically, then removes the older ones beyond `keep`, and later ones, which a run
  // that was resumed from an earlier step has left. If writing fails, all files stay as they are. Throws SystemError.
  // fetch: as for save_safetensors().
  void save(std::int64_t step, const TensorFile& file, const FetchTensor& fetch = nullptr);

  // The same for a copy of the state, of what split() returns.
  void save(std::int64_t step, FileImage& image);

  std::vector<TensorFile> split(const TensorFile& file) const { return split_into_shards(file, shard_bytes_); }

  bool empty() const { return newest_first().empty(); }

  struct Loaded {
    std::filesystem::path path;
    CheckpointReader file;  // whole and verified
  };
  // The newest checkpoint that is not damaged; a damaged one is named in a warning. Nothing if the folder has none.
  // Throws CheckpointError if it has some, but all of them are damaged.
  std::optional<Loaded> load_newest() const;

 private:
  std::vector<std::filesystem::path> newest_first() const;
  struct Files;
  void save_files(std::int64_t step, const Files& files);
  void remove_all_but(std::int64_t newest);

  std::filesystem::path folder_;
  UniqueFd lock_;
  int keep_;
  std::size_t shard_bytes_;
};

}  // namespace lockstep
