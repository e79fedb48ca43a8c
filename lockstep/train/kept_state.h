// SPDX-License-Identifier: Apache-2.0
// train/kept_state.h: the newest state of a run in memory that outlives the ranks (launch/job_memory.h): what they go on
// from when one of them was lost.
//
// Flow:    train/snapshot.h -> save() -> memory of the launcher -> newest(), in the next generation -> SharedCheckpoint
// Owns:    two images, written in turn: a rank that is lost while it writes one leaves the other whole
// Threads: one thread
// Ranks:   rank 0 of a run saves; every rank may look
#pragma once

#include <array>
#include <cstddef>
#include <optional>

#include "lockstep/checkpoint/checkpoint_folder.h"
#include "lockstep/checkpoint/file_image.h"
#include "lockstep/launch/job_memory.h"

namespace lockstep {

class KeptState {
 public:
  // Throws SystemError.
  explicit KeptState(JobMemory& memory);

  // Copies the state; fetch: as for save_safetensors(). The first save of a generation lets the launcher forget the one
  // before. Throws SystemError: no memory.
  void save(TensorFile file, const FetchTensor& fetch = nullptr);

  // The newest whole image of the last generation that had one. Blocks for the launcher's answer.
  static std::optional<CheckpointFolder::Loaded> newest(JobMemory& memory);

 private:
  JobMemory& memory_;
  std::array<FileImage, 2> images_;
  std::size_t saves_ = 0;
};

}  // namespace lockstep
