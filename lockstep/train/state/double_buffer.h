// SPDX-License-Identifier: Apache-2.0
// train/state/double_buffer.h: the two newest images of one rank's state, in memory that the launcher keeps when the rank is gone.
//
// Flow:    TensorFile -> write() -> memory of the launcher -> a later process: images_in() -> SafetensorsReader
// Owns:    two pieces of shared memory, each with a page that says what is in it, and the bytes of a safetensors file
// Threads: one thread
// Ranks:   no communication: one rank writes, any process of the machine that is given the memory reads
//
// write() takes the two in turn, so one of them is always whole: a rank may be killed at any instruction of it. What is
// half written is marked before the first byte and until after the last one.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "agent/recover/job_memory.h"
#include "lockstep/base/files/unique_fd.h"
#include "lockstep/checkpoint/safetensors.h"
#include "lockstep/world.h"

namespace lockstep {

// The rank whose state it is, in the World that wrote it.
struct ImageOwner {
  int32_t rank = 0;
  int32_t ranks = 1;
  int32_t local_ranks = 1;
};

// Memory that the launcher has kept, mapped for as long as somebody holds it.
struct MappedMemory {
  std::shared_ptr<std::byte> begin{};
  size_t size = 0;
};

// All of what this descriptor has; empty where that is nothing. Throws SystemError.
MappedMemory map_memory(const UniqueFd& fd);

class DoubleBuffer {
 public:
  // Takes no memory yet. name: of this kind of state in the launcher's memory.
  DoubleBuffer(JobMemory& memory, std::string name, const World& world);

  // Goes on with the memory of a former process of this rank, which is given to the launcher again, under the present
  // generation. The image of `step` stays until the one after next is written; another one is of a step that not all ranks
  // have kept, and is dropped. Returns whether there is one of that step.
  bool adopt(std::vector<JobMemory::Kept>& former, int64_t step);

  // Blocks for a copy, which says what program has made it; the first two take memory, and three times as long. Throws
  // SystemError (no memory left), UsageError (a dtype that safetensors does not know).
  void write(int64_t step, TensorFile file);

 private:
  void resize(size_t index, size_t bytes);

  JobMemory& memory_;
  std::string name_;
  ImageOwner owner_;
  struct Slot {
    UniqueFd fd;            // none: no memory was taken yet
    MappedMemory memory{};  // with the head
  };
  std::array<Slot, 2> slots_;
  size_t next_ = 0;
};

// An image that is whole, in memory that the launcher has kept.
struct StateImage {
  ImageOwner owner;
  int64_t step = 0;
  MappedMemory bytes;
};

// The images of `name`, in the order of the ranks. A slot that is half written has none.
std::vector<StateImage> images_in(const std::vector<JobMemory::Kept>& kept, const std::string& name);

// The image of a step: of this rank, else of the first one that has it. Null: there is none.
const StateImage* image_of(const std::vector<StateImage>& images, int64_t step, std::optional<int> rank = {});

SafetensorsReader reader_of(const MappedMemory& image);  // throws CheckpointError: of another program

}  // namespace lockstep
