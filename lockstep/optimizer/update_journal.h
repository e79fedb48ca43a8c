// SPDX-License-Identifier: Apache-2.0
// optimizer/update_journal.h: what is written down during an update in memory that outlives the ranks, so that other processes
// can finish the step, with the same bits, wherever any of its ranks was killed.
//
// Flow:    FlatUpdate -> here, while it updates; manifest + the ranks' memory -> KeptUpdate -> FlatUpdate::finish()
// Owns:    UpdateJournal: a share of common memory, this rank's redo slots. KeptUpdate: nothing in the memory that it reads
// Threads: one, except RedoSlot and mark(): one thread per slot and chunk
// Ranks:   every rank writes its own record and slots, and the marks of the chunks that it owns
//
// Note [An update that others can finish]
// Once barrier 2 has let any rank through, the step counts: every gradient is in memory that outlives its rank. Three things
// are written then, all by plain stores to memory:
//
//   a record, by every rank before its first write: the step's number, its settings, where the gradients are. The record's own
//       number is stored last. If no rank has completed the record of a step, then nothing of that step was written, and the
//       record before that, which is kept until then, says how many updates each parameter has had.
//   a redo copy, before a run of a chunk is written: its new values, then which run it is, then the key that says that
//       the copy is complete. Only then do the values go to their place. A thread uses the same slot for all its runs, so
//       it stays in cache.
//   a mark of the chunk, when the run is in its place. The redo copy is void from then on.
//
// finish() puts each run in its place whose redo copy is complete and whose mark is missing, and then runs the step as
// FlatUpdate always does, except that it passes over what is marked. All inputs of the other runs are as they were:
// gradients do not change before barrier 3, and a run's own parameters and state are old. What a phase needs of a phase
// before (norms, directions of layerwise rules) is in kept memory too and was complete before its mark.
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

// How far a chunk is: which step and phase, and how many of its elements have gone through that. Marks only grow.
enum class ChunkPhase : std::uint64_t { kDirected = 0, kUpdated = 1 };
class ChunkMark {
 public:
  static constexpr std::uint64_t kAll = 0xffff;  // elements, and whatever else belongs to the phase

  constexpr ChunkMark(std::uint64_t step, ChunkPhase phase, std::uint64_t elements)
      : word_((2 * step + static_cast<std::uint64_t>(phase)) << 16 | elements) {}
  constexpr explicit ChunkMark(std::uint64_t word) : word_(word) {}

  constexpr std::uint64_t word() const { return word_; }
  constexpr ChunkPhase phase() const { return static_cast<ChunkPhase>(word_ >> 16 & 1); }
  constexpr std::int64_t elements_in(std::uint64_t step, ChunkPhase phase) const {
    return word_ >> 16 == ChunkMark(step, phase, 0).word_ >> 16 ? static_cast<std::int64_t>(word_ & kAll) : 0;
  }
  auto operator<=>(const ChunkMark&) const = default;

 private:
  std::uint64_t word_;
};

// The new values of the run that one thread writes at the moment.
class RedoSlot {
 public:
  // What the update of a run writes, at most: values, two arrays, an average, 16-bit values.
  static constexpr std::size_t kMaxParts = 5;
  struct Parts {
    std::array<std::span<std::byte>, kMaxParts> all{};
    std::size_t count = 0;
    void add(void* data, std::size_t bytes) { all[count++] = {static_cast<std::byte*>(data), bytes}; }
  };
  struct Elements {
    std::size_t chunk;
    std::int64_t begin, count;  // elements, from the start of the chunk
  };
  static std::size_t bytes(std::size_t data) { return sizeof(RedoSlot) + round_up(data, kCacheLine); }

  Parts begin(const Parts& places);  // a copy begins: room for new values, each part as long as its place
  void complete(const Elements& elements, ChunkMark mark);  // the mark that the chunk has when the run is in its place
  void put(const Parts& places) const;
  void clear() { key_.store(0, std::memory_order_release); }

  ChunkMark leads_to() const { return ChunkMark(key_.load(std::memory_order_acquire)); }  // 0: no complete copy
  Elements elements() const;

 private:
  std::byte* data() const { return reinterpret_cast<std::byte*>(const_cast<RedoSlot*>(this)) + sizeof(RedoSlot); }

  alignas(kCacheLine) std::atomic<std::uint64_t> key_;
  std::atomic<std::uint64_t> chunk_;
  std::atomic<std::int64_t> begin_, count_;
};

// Sizes of a journal; the same for all ranks.
struct JournalShape {
  std::size_t ranks = 0;
  std::size_t parameters = 0;
  std::size_t groups = 0;
  std::size_t sources = 0;  // of gradients
  std::size_t chunks = 0;
  std::size_t redo_bytes = 0;  // that is written at a time, at most
};

// A step's settings, as a rank has them after barrier 2, or as others find them.
struct StepRecord {
  std::uint64_t step = 0;
  bool skipped = false;  // because of its loss scale: nothing is written
  ClippingOptions clipping;
  std::optional<double> loss_scale;
  std::vector<double> weights;                                // of each source
  std::vector<OptimizerOptions> options;                      // of each group
  std::vector<std::int64_t> steps;                            // of each parameter, before this one
  std::vector<char> is_updated;                               // each parameter
  std::vector<std::optional<SharedMemory::Place>> gradients;  // [parameter][source]
};

// The journal in memory: common to the ranks, but for the redo slots, which are in each rank's own arena.
class UpdateJournal {
 public:
  static std::size_t bytes(const JournalShape& shape);

  UpdateJournal(std::byte* memory, const JournalShape& shape);

  ChunkMark mark(std::size_t chunk) const { return ChunkMark(marks_[chunk].load(std::memory_order_acquire)); }
  void set_mark(std::size_t chunk, ChunkMark mark) { marks_[chunk].store(mark.word(), std::memory_order_release); }

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

  // Has a redo slot for each of so many threads. Between two updates.
  void make_room(std::size_t threads);

  // A pass begins, in which each thread that takes part takes a slot, once.
  void begin_pass() { taken_->store(0, std::memory_order_relaxed); }
  RedoSlot& take_slot() { return *slots_.at(taken_->fetch_add(1, std::memory_order_relaxed)); }

  void write(const StepRecord& record) { journal_.write(rank_, ++records_, record); }
  void write_skipped(std::uint64_t step) { journal_.write_skipped(rank_, step); }
  ChunkMark mark(std::size_t chunk) const { return journal_.mark(chunk); }
  void set_mark(std::size_t chunk, ChunkMark mark) { journal_.set_mark(chunk, mark); }

  std::vector<RedoSlot*> all_slots() const;  // of all ranks, of a journal that is kept
  const JournalShape& shape() const { return journal_.shape(); }
  std::span<const std::byte> memory() const { return journal_.memory(); }

 private:
  std::vector<RedoSlot*> slots_at(std::byte* memory, std::size_t count) const;

  std::shared_ptr<SharedMemory> memory_;  // of a journal that is written for the first time
  KeptUpdate::Find find_;                 // of a kept one
  std::shared_ptr<std::byte> common_;
  UpdateJournal journal_;
  int rank_;
  std::uint64_t records_ = 0;  // that it has written
  SharedMemory::Own redo_;
  std::vector<RedoSlot*> slots_;  // of this rank
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
