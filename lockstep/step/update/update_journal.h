// SPDX-License-Identifier: Apache-2.0
// step/update/update_journal.h: the journal of an update, in memory that outlives the ranks: with it other processes can finish the
// step, with the same bits, wherever any of its ranks was killed.
//
// Flow:    FlatUpdate -> journal_writer.h -> here; manifest + the ranks' memory -> InterruptedUpdate -> FlatUpdate::finish()
// Owns:    nothing: the memory is the ranks'
// Threads: one, except RedoSlot and marks: one thread per slot and chunk
// Ranks:   every rank writes its own record and slots, and the marks of the chunks that it owns
//
// docs/design/recovery.md ("The update") says what is written when, and why a step can be finished wherever its ranks were
// killed. All are plain stores, whose order fences hold: what counts is the prefix of its instructions that a process has
// executed. What a phase needs of the phase before it (norms, directions of layerwise rules) is in kept memory too and was
// complete before its mark. finish() uses the same slots and marks, so it may be killed as well, and be begun again.
#pragma once

#include <torch/types.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <limits>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "lockstep/base/cache_line.h"
#include "lockstep/collective/shared_memory.h"
#include "lockstep/optimizers.h"
#include "lockstep/step/update/optimizer_state.h"

namespace lockstep {

// The progress of a chunk: its step and phase, and how many of its elements have gone through that. Marks only grow.
enum class ChunkPhase : uint64_t { kDirected = 0, kUpdated = 1 };
class ChunkMark {
 public:
  static constexpr int64_t kAll = 0xffff;  // all elements, and whatever else belongs to the phase

  constexpr ChunkMark(uint64_t step, ChunkPhase phase, int64_t elements)
      : word_((2 * step + static_cast<uint64_t>(phase)) << 16 | static_cast<uint64_t>(elements)) {}
  constexpr explicit ChunkMark(uint64_t word) : word_(word) {}

  constexpr uint64_t word() const { return word_; }
  constexpr ChunkPhase phase() const { return static_cast<ChunkPhase>(word_ >> 16 & 1); }
  constexpr int64_t elements_in(uint64_t step, ChunkPhase phase) const {
    return word_ >> 16 == ChunkMark(step, phase, 0).word_ >> 16 ? static_cast<int64_t>(word_ & kAll) : 0;
  }
  auto operator<=>(const ChunkMark&) const = default;

 private:
  uint64_t word_;
};

// Elements [begin, begin + count) of a chunk.
struct ChunkPart {
  size_t chunk;
  int64_t begin, count;
};

// The new values of the part that one thread writes at the moment.
class RedoSlot {
 public:
  static size_t bytes(size_t data) { return sizeof(RedoSlot) + round_up(data, kCacheLine); }

  Targets begin(const Targets& targets);  // the same, with room for new values instead of those that are written
  void complete(const ChunkPart& part, ChunkMark mark);  // mark: of the chunk, once the part is in its targets
  void put(const Targets& targets) const;
  void clear() { key_.store(0, std::memory_order_release); }

  ChunkMark leads_to() const { return ChunkMark(key_.load(std::memory_order_acquire)); }  // 0: no complete copy
  const ChunkPart& part() const { return part_; }

 private:
  std::byte* data() const { return reinterpret_cast<std::byte*>(const_cast<RedoSlot*>(this)) + sizeof(RedoSlot); }

  alignas(kCacheLine) std::atomic<uint64_t> key_;
  ChunkPart part_;
};

// Sizes of a journal; the same for all ranks.
struct JournalShape {
  size_t ranks = 0;
  size_t parameters = 0;
  size_t groups = 0;
  size_t sources = 0;  // of gradients
  size_t chunks = 0;
  size_t redo_bytes = 0;  // written at a time, at most
};

// A place in an arena as one word.
inline constexpr uint64_t kNoPlace = std::numeric_limits<uint64_t>::max();
uint64_t word_of_place(const std::optional<SharedMemory::ArenaOffset>& place);
SharedMemory::ArenaOffset place_of_word(uint64_t word);

// A step's settings, as a rank has them after barrier 2, or as others find them.
struct StepRecord {
  explicit StepRecord(const JournalShape& shape);  // of step 0, without gradients

  uint64_t step = 0;
  ClippingOptions clipping{};
  double loss_scale = std::numeric_limits<double>::quiet_NaN();  // NaN: none
  std::vector<double> weights;                                   // of each source
  std::vector<OptimizerOptions> options;                         // of each group
  std::vector<int64_t> steps;                                    // of each parameter, before this one
  std::vector<uint64_t> gradients;                               // [parameter][source] words of places
  bool skipped = false;  // because of its loss scale: nothing is written. Kept beside the record
};

// The journal in memory: common to the ranks, but for the redo slots, which are in each rank's own arena.
class UpdateJournal {
 public:
  static size_t bytes(const JournalShape& shape);

  UpdateJournal(std::byte* memory, const JournalShape& shape);

  ChunkMark mark(size_t chunk) const { return ChunkMark(marks_[chunk].load(std::memory_order_acquire)); }
  void set_mark(size_t chunk, ChunkMark mark) { marks_[chunk].store(mark.word(), std::memory_order_release); }

  void write(int rank, uint64_t number, const StepRecord& record);  // number: of the record, from 1
  void write_skipped(int rank, uint64_t step);
  std::optional<StepRecord> newest() const;  // the newest complete record of any rank

  struct Slots {
    SharedMemory::ArenaOffset place;
    size_t count = 0;
  };
  void set_slots(int rank, const Slots& slots);  // at least as many as before: whoever is killed meanwhile has those
  Slots slots(int rank) const;

  const JournalShape& shape() const { return shape_; }
  std::span<const std::byte> memory() const { return {memory_, bytes(shape_)}; }

 private:
  struct Seat;
  Seat& seat(int rank) const;
  std::byte* record(int rank, uint64_t number) const;

  JournalShape shape_;
  std::byte* memory_;
  size_t record_bytes_;
  std::atomic<uint64_t>* marks_;
};

// Memory of an update beside the optimizer's state.
struct UpdateMemory {
  std::span<const std::byte> journal;
  std::span<const std::byte> norms;
  std::span<const std::byte> directions;  // of layerwise rules; else empty
};

// A text for InterruptedUpdate: where everything lies in the ranks' arenas. Throws UsageError: something is in none.
std::string manifest_of(const OptimizerState& state, const JournalShape& shape, const UpdateMemory& beside,
                        const SharedMemory& memory);

// An update whose ranks were lost: made from a manifest, in a process that maps the ranks' arenas.
struct InterruptedUpdate {
  // Returns the address of `bytes` at a place in an arena, in this process. Throws if there is no such place.
  using Find = std::function<std::byte*(const SharedMemory::ArenaOffset& place, size_t bytes)>;

  // Throws CheckpointError: not a manifest of this version.
  InterruptedUpdate(const std::string& manifest, Find find);

  OptimizerState state;  // tensors in that memory; steps: once it is finished
  JournalShape shape;
  std::byte* journal = nullptr;
  std::byte* norms = nullptr;
  std::byte* directions = nullptr;  // of layerwise rules
  Find find;
};

}  // namespace lockstep
