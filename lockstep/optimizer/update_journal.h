// SPDX-License-Identifier: Apache-2.0
// optimizer/update_journal.h: what is written down during an update in memory that outlives the ranks, so that other processes
// can finish the step, with the same bits, wherever any of its ranks was killed.
//
// Flow:    FlatUpdate -> here, while it updates; manifest + the ranks' memory -> KeptUpdate -> FlatUpdate::finish()
// Owns:    UpdateJournal: a share of common memory, this rank's undo slots. KeptUpdate: nothing in the memory that it reads
// Threads: one, except UndoSlot and mark(): one thread per slot and chunk
// Ranks:   every rank writes its own record and slots, and the marks of the chunks that it owns
//
// Note [An update that others can finish]
// Once barrier 2 has let any rank through, the step counts: every gradient is in memory that outlives its rank. Three things
// are written then, all by plain stores to memory:
//
//   a record, by every rank before its first write: the step's number, its settings, where the gradients are. The record's own
//       number is stored last. If no rank has completed the record of a step, then nothing of that step was written, and the
//       record before that, which is kept until then, says how many updates each parameter has had.
//   an undo copy, before a chunk is written: the old values of all that is going to change, then the chunk's number, then a
//       key that says that the copy is complete. A thread uses the same slot for all its chunks, so it stays in cache.
//   a mark, when the chunk is written. It makes the undo copy void.
//
// finish() puts back each chunk whose undo copy is complete and whose mark is missing, and then runs the step as FlatUpdate
// always does, except that it passes over what is marked. All inputs of the other chunks are as they were: gradients do not
// change before barrier 3, and a chunk's own parameters and state are old. What a phase needs of a phase before (norms,
// directions of layerwise rules) is in kept memory too and was complete before its mark.
//
// finish() uses the same slots and marks, so it may be killed as well, and be begun again.
//
// A killed process has executed its instructions up to some point and none after it, so what counts is their order, which
// fences hold against the compiler and, for those who look while it lives, against the processor.
#pragma once

#include <torch/types.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "lockstep/base/cache_line.h"
#include "lockstep/collective/shared_memory.h"
#include "lockstep/optimizer/optimizer_state.h"
#include "lockstep/optimizers.h"

namespace lockstep {

struct UpdateStep;

// What a chunk has gone through in a step, as its mark and a complete undo copy say it. Marks only grow.
enum class ChunkPhase : std::uint64_t { kDirected = 1, kUpdated = 2 };
constexpr std::uint64_t key_of(std::uint64_t step, ChunkPhase phase) {
  return 4 * step + static_cast<std::uint64_t>(phase);
}
constexpr ChunkPhase phase_of(std::uint64_t key) { return static_cast<ChunkPhase>(key % 4); }

// The old values of the chunk that one thread writes at the moment.
class UndoSlot {
 public:
  // What a chunk's update writes, at most: values, two arrays, an average, 16-bit values.
  static constexpr std::size_t kMaxParts = 5;
  struct Parts {
    std::array<std::span<std::byte>, kMaxParts> all{};
    std::size_t count = 0;
    void add(void* data, std::size_t bytes) { all[count++] = {static_cast<std::byte*>(data), bytes}; }
  };
  static std::size_t bytes(std::size_t data) { return sizeof(UndoSlot) + round_up(data, kCacheLine); }

  void save(std::size_t chunk, std::uint64_t key, const Parts& parts);
  void restore(const Parts& parts) const;
  void clear() { key_.store(0, std::memory_order_release); }

  std::uint64_t key() const { return key_.load(std::memory_order_acquire); }  // 0: no complete copy
  std::size_t chunk() const { return chunk_.load(std::memory_order_relaxed); }

 private:
  std::byte* data() const { return reinterpret_cast<std::byte*>(const_cast<UndoSlot*>(this)) + sizeof(UndoSlot); }

  alignas(kCacheLine) std::atomic<std::uint64_t> key_;
  std::atomic<std::uint64_t> chunk_;
};

// Sizes of a journal; the same for all ranks.
struct JournalShape {
  std::size_t ranks = 0;
  std::size_t parameters = 0;
  std::size_t groups = 0;
  std::size_t sources = 0;  // of gradients
  std::size_t chunks = 0;
  std::size_t undo_bytes = 0;  // that the update of a chunk writes, at most
};

// A step's settings, as a rank has them after barrier 2, or as others find them.
struct StepRecord {
  std::uint64_t step = 0;
  bool skipped = false;  // because of its loss scale: nothing is written
  ClippingOptions clipping;
  std::optional<double> loss_scale;
  std::vector<double> weights;                               // of each source
  std::vector<OptimizerOptions> options;                     // of each group
  std::vector<std::int64_t> steps;                           // of each parameter, before this one
  std::vector<char> is_updated;                              // each parameter
  std::vector<std::optional<SharedMemory::Place>> gradients;  // [parameter][source]
};

// The journal in memory: common to the ranks, but for the undo slots, which are in each rank's own arena.
class UpdateJournal {
 public:
  static std::size_t bytes(const JournalShape& shape);

  UpdateJournal(std::byte* memory, const JournalShape& shape);

  std::uint64_t mark(std::size_t chunk) const { return marks_[chunk].load(std::memory_order_acquire); }
  void set_mark(std::size_t chunk, std::uint64_t key) { marks_[chunk].store(key, std::memory_order_release); }

  void write(int rank, std::uint64_t number, const StepRecord& record);  // number: of the record, from 1
  void write_skipped(int rank, std::uint64_t step);
  std::optional<StepRecord> newest() const;  // complete record, of any rank

  struct Slots {
    SharedMemory::Place place;
    std::size_t count = 0;
  };
  void set_slots(int rank, const Slots& slots);
  Slots slots(int rank) const;

  const JournalShape& shape() const { return shape_; }
  std::span<const std::byte> memory() const { return {memory_, bytes(shape_)}; }

 private:
  struct Seat;
  struct Record;
  static std::size_t bytes_of_rank(const JournalShape& shape);
  Seat& seat(int rank) const;
  Record record(const Seat& seat, std::size_t which) const;

  JournalShape shape_;
  std::byte* memory_;
  std::atomic<std::uint64_t>* marks_;
};

// Where an update keeps what outlives its ranks: made from a manifest, in a process that maps the ranks' arenas.
struct KeptUpdate {
  // The address here of a place in an arena, for so many bytes. Throws what it likes if there is none.
  using Find = std::function<std::byte*(const SharedMemory::Place& place, std::size_t bytes)>;

  // Throws CheckpointError: not a manifest of this version.
  KeptUpdate(const std::string& manifest, Find find);

  OptimizerState state;  // tensors in that memory; steps: once it is finished
  JournalShape shape;
  std::byte* journal = nullptr;
  std::byte* norms = nullptr;
  std::byte* directions = nullptr;  // of layerwise rules
  Find find;
};

// One rank's side of a journal.
class JournalWriter {
 public:
  // Of ranks that share memory: collective, blocks. Throws SystemError, PeerLost.
  JournalWriter(std::shared_ptr<SharedMemory> memory, const JournalShape& shape);

  // Of one that finishes what `kept` describes, in the place of its rank.
  JournalWriter(const KeptUpdate& kept, int rank);

  // Has an undo slot for each of so many threads. Between two updates.
  void make_room(std::size_t threads);

  // A pass begins, in which each thread that takes part takes a slot, once.
  void begin_pass() { taken_->store(0, std::memory_order_relaxed); }
  UndoSlot& take_slot() { return *slots_.at(taken_->fetch_add(1, std::memory_order_relaxed)); }

  void write(const StepRecord& record) { journal_.write(rank_, ++records_, record); }
  void write_skipped(std::uint64_t step) { journal_.write_skipped(rank_, step); }
  std::uint64_t mark(std::size_t chunk) const { return journal_.mark(chunk); }
  void set_mark(std::size_t chunk, std::uint64_t key) { journal_.set_mark(chunk, key); }

  std::vector<UndoSlot*> all_slots() const;  // of all ranks, of a journal that is kept
  const JournalShape& shape() const { return journal_.shape(); }
  std::span<const std::byte> memory() const { return journal_.memory(); }

 private:
  std::vector<UndoSlot*> slots_at(std::byte* memory, std::size_t count) const;

  std::shared_ptr<SharedMemory> memory_;  // of a journal that is written for the first time
  KeptUpdate::Find find_;                 // of a kept one
  std::shared_ptr<std::byte> common_;
  UpdateJournal journal_;
  int rank_;
  std::uint64_t records_ = 0;  // that it has written
  SharedMemory::Own undo_;
  std::vector<UndoSlot*> slots_;  // of this rank
  std::unique_ptr<std::atomic<std::size_t>> taken_ = std::make_unique<std::atomic<std::size_t>>();
};

// What FlatUpdate keeps beside the optimizer's state.
struct ManifestPlaces {
  std::span<const std::byte> journal;
  std::span<const std::byte> norms;
  std::span<const std::byte> directions;  // of layerwise rules; else empty
};

// A text for KeptUpdate: where everything lies in the ranks' arenas. Throws UsageError: something is in none.
std::string manifest_of(const OptimizerState& state, const JournalShape& shape, const ManifestPlaces& places,
                        const SharedMemory& memory);

}  // namespace lockstep
