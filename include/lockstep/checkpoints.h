// SPDX-License-Identifier: Apache-2.0
// lockstep/checkpoints.h: the newest checkpoints of your own training loop, written in the background.
//
// Flow:    save() -> a copy in memory -> a thread -> DIR/step-00000470.safetensors; newest() -> load_safetensors()
// Owns:    the folder (its file .lock keeps a second writer out), one copy of the state, a thread of low priority
// Threads: one at a time
// Ranks:   one rank of a job has one, usually rank 0; no communication
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>

#include "lockstep/checkpoint.h"

namespace lockstep {

class CheckpointWriter;

class Checkpoints {
 public:
  // Makes the folder if it is missing. after: goes back to the checkpoint of this step on purpose: later ones are renamed to
  // NAME.after-STEP, and never counted or removed. Throws CheckpointError: the folder can't be written; another process writes
  // there, and which; there is no whole checkpoint of the step `after`.
  explicit Checkpoints(const std::filesystem::path& folder, std::optional<int64_t> after = std::nullopt);

  // Waits for the disk, at most ten seconds.
  ~Checkpoints();
  Checkpoints& operator=(Checkpoints&&) = delete;

  // The newest checkpoint that is whole; nothing if there is none. Reads it for its checksum. Newer ones that are damaged are
  // renamed to NAME.damaged, with a warning. If a save is still being written, waits for it first, at most ten seconds.
  // Throws CheckpointError: there are some, and all are damaged; the disk does not answer. Throws SystemError: one can't be read.
  std::optional<std::filesystem::path> newest() const;

  // Blocks for a copy of the tensors (CPU or GPU, any layout) in memory; if the save before this one is still being written,
  // first for that, at most ten seconds. The two newest checkpoints are kept. A disk that is full or does not answer is a
  // warning, and the next save tries again. Throws UsageError: as save_safetensors() does. Throws CheckpointError: the folder
  // has a checkpoint above `step` that this object has neither written nor read in newest(); nothing is saved. One above `step`
  // that it has is renamed to NAME.after-STEP once this one is saved.
  void save(int64_t step, const TensorFile& file);

  // Blocks until nothing is being written any more. Throws CheckpointError: the newest on the disk is not that of `step`, and
  // why; or the timeout.
  void finish(int64_t step, std::chrono::milliseconds timeout = std::chrono::minutes(5));

 private:
  std::unique_ptr<CheckpointWriter> writer_;
};

}  // namespace lockstep
