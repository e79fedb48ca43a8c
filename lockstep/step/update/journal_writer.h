// SPDX-License-Identifier: Apache-2.0
// step/update/journal_writer.h: the seam between an update and its journal. With a journal, other processes can finish a step whose
// ranks are lost (update_journal.h). Without one, as long as nobody calls keep(), each call is a test of one flag: new values go to
// their targets at once, and a chunk is written as one part.
//
//   begin_step()
//   in each pass over the chunks, for each chunk that is not done in the pass's phase:
//     for each part from first_element() on, of at most part_elements(): begin_part(), write what it returns, end_part()
//
// Flow:    flat_update.h -> here -> update_journal.h
// Owns:    this rank's side of the journal
// Threads: one; any number write parts, those of one at::parallel_for, each of chunks of its own
// Ranks:   the ranks that share the parameters make the same calls, but for parts, in the same order
#pragma once

#include <ATen/Parallel.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/base/to_size.h"
#include "lockstep/step/update/mean.h"
#include "lockstep/step/update/update_journal.h"

namespace lockstep {

struct UpdateStep;

struct JournalOptions {
  std::size_t kept_sources = 0;  // of gradients, in memory that outlives the ranks; 0: no journal
  std::size_t groups = 1;
  bool layerwise = false;
};

class JournalWriter {
 public:
  explicit JournalWriter(const OptimizerState& state) : state_(state) {}

  // From here on others can finish a step. beside: all but the journal. Collective, blocks.
  void keep(std::shared_ptr<SharedMemory> memory, const JournalOptions& options, std::size_t chunks,
            UpdateMemory beside);

  // Goes on in the place of a rank of `lost`: begin_step() then begins its step again.
  void resume(const InterruptedUpdate& lost, int rank, std::uint64_t step);

  // A step begins: writes the record that makes it count, before anything else is written.
  void begin_step(const UpdateStep& step);
  void skip_step();                               // it writes nothing
  std::uint64_t step() const { return number_; }  // the number of the last one

  // The state was written between two steps, by all ranks alike: others find it with the number of updates that it has now.
  void note_state();

  RedoSlot* slot_of_thread() const { return journal_ ? slots_.at(to_size(at::get_thread_num())) : nullptr; }

  bool is_done(std::size_t chunk, ChunkPhase phase) const {
    return journal_ && journal_->mark(chunk) >= ChunkMark(number_, phase, ChunkMark::kAll);
  }
  std::int64_t first_element(std::size_t chunk, ChunkPhase phase) const {
    if (!journal_) return 0;
    return journal_->mark(chunk).elements_in(number_, phase);
  }

  // Old and new values of a part fit the first-level cache.
  static constexpr std::int64_t kPartElements = 1024;
  std::int64_t part_elements() const { return journal_ ? kPartElements : kMaxChunk; }

  struct Part {
    RedoSlot* slot;  // of the thread
    ChunkPart elements;
    ChunkMark mark;  // of the chunk, once the part is in its targets
    Targets targets;
  };
  ChunkMark mark_of(ChunkPhase phase, std::int64_t elements) const { return {number_, phase, elements}; }

  // Returns where the new values are to be written: to the targets, or beside them.
  Targets begin_part(const Part& part) {
    if (!journal_) return part.targets;
    return part.slot->begin(part.targets);
  }

  // The new values are written: they go to their targets.
  void end_part(const Part& part) {
    if (!journal_) return;
    part.slot->complete(part.elements, part.mark);
    part.slot->put(part.targets);
    journal_->set_mark(part.elements.chunk, part.mark);
  }

  // Puts in its targets what killed threads had ready in chunks [first, last). targets_of: of a part in a phase.
  void put_ready_parts(std::size_t first, std::size_t last,
                       const std::function<Targets(const ChunkPart&, ChunkPhase)>& targets_of);

  // A text for InterruptedUpdate; "" before keep().
  std::string manifest() const;

 private:
  void make_slots();
  std::vector<RedoSlot*> slots_at(std::byte* memory, std::size_t count) const;
  std::vector<RedoSlot*> slots_of(int rank) const;

  const OptimizerState& state_;
  std::optional<UpdateJournal> journal_;
  int rank_ = 0;
  std::uint64_t number_ = 0;              // of the step
  std::uint64_t records_ = 0;             // written by this rank
  std::shared_ptr<SharedMemory> memory_;  // of keep()
  UpdateMemory beside_;
  std::shared_ptr<std::byte> common_;
  SharedMemory::Own redo_;
  InterruptedUpdate::Find find_;  // of resume()
  std::vector<RedoSlot*> slots_;  // of this rank: one for each thread
};

}  // namespace lockstep
