// SPDX-License-Identifier: Apache-2.0
// checkpoint/checkpoint_writer.h: saves while training goes on: a save costs the step one copy of the state, and a thread
// writes it. A disk that is full or does not answer ends no job: the log says so, and the next save tries again.
//
// Flow:    save() -> StateCopy -> the writer's thread -> CheckpointFolder
// Owns:    the folder, one copy of the state and the thread. Where the disk does not answer in time, the thread is left
//          behind, with what it uses (the folder's lock, too), and ends when the disk answers
// Threads: one thread calls. The writer's own has a low priority: the ranks need the cores
// Ranks:   only rank 0 has one
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "lockstep/checkpoint/checkpoint_folder.h"

namespace lockstep {

// A copy of tensors, in memory that it keeps for the next one: fetching and clearing fresh pages takes time, too.
class StateCopy {
 public:
  ~StateCopy();
  StateCopy& operator=(StateCopy&&) = delete;

  // Copies the tensors, of which none is on the meta device, at the speed of memory. What it returns refers to the memory
  // here, until the next call. Throws SystemError: the cgroup or the machine has no room.
  TensorFile copy(const TensorFile& file);

 private:
  void reserve(size_t bytes);

  std::span<std::byte> memory_;
};

class CheckpointWriter {
 public:
  // patience: how long a save waits for the one before it, and the destructor for the last.
  explicit CheckpointWriter(CheckpointFolder folder, std::chrono::milliseconds patience = std::chrono::seconds(10));
  ~CheckpointWriter();
  CheckpointWriter& operator=(CheckpointWriter&&) = delete;

  // Waits until nothing is being written, at most `patience`; then throws CheckpointError.
  CheckpointFolder& folder();

  // Blocks for a copy of the state. If the save before it is still being written, waits for that first, at most `patience`;
  // then leaves this one out and says so, and the next ones at once until the disk has answered. Where tensors come from
  // other ranks (fetch), or there is no memory for a copy, blocks until the file is written. Throws what fetch throws,
  // UsageError and CheckpointFolder::require_newest()'s error, but nothing because of the disk.
  void save(int64_t step, const TensorFile& file, const FetchTensor& fetch = nullptr);

  // Waits, at most `timeout`, until nothing is being written. Returns whether the newest checkpoint on the disk is that of
  // `step`; if not, trouble() says why.
  bool finish(int64_t step, std::chrono::milliseconds timeout);
  std::string trouble() const;

  void keep_also(int64_t step) { also_ = step; }  // CheckpointFolder::keep_also(), from the next save on

  struct Saved {
    int64_t step = -1;
    double seconds = 0;  // from the end of the copy until it was on the disk
    std::string path;
  };
  std::vector<Saved> take_saved();  // what has been written since the last call. Does not block

 private:
  struct Shared;
  bool wait_until_idle(std::chrono::milliseconds timeout);
  void save_now(int64_t step, const TensorFile& file, const FetchTensor& fetch);

  std::shared_ptr<Shared> shared_;  // with the thread
  std::chrono::milliseconds patience_;
  int64_t also_ = -1;
  bool stalled_ = false;  // the last wait for the disk was in vain
  std::thread thread_;
};

}  // namespace lockstep
