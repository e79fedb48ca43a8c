// SPDX-License-Identifier: Apache-2.0
// optimizer/run_writer.h: where an update writes its new values: to their places; or, where other processes may have to finish
// the step, beside them first, with a journal of what is done.
//
// Flow:    flat_update.h, run by run -> here -> parameters, optimizer state, update_journal.h
// Owns:    this rank's side of the journal
// Threads: one; write() and begin_chunks() any number, each with chunks of its own
// Ranks:   the ranks that share the parameters make the same calls, but for write(), in the same order
#pragma once

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/optimizer/chunks.h"
#include "lockstep/optimizer/flat_update.h"
#include "lockstep/optimizer/update_journal.h"

namespace lockstep {

class RunWriter {
 public:
  // To their places, until keep().
  explicit RunWriter(OptimizerState& state) : state_(state) {}

  // From here on others can finish a step. Collective, blocks; the other one is for who finishes what `kept` describes, in the
  // place of its rank.
  void keep(std::shared_ptr<SharedMemory> memory, const UpdateOptions& options, std::size_t chunks);
  void keep(const KeptUpdate& kept, int rank) { journal_.emplace(kept, rank); }

  // A step begins: the record that makes it count, before anything is written.
  void begin_step(std::uint64_t number, const UpdateStep& step, const std::vector<char>& is_updated,
                  const SharedMemory& memory);
  void skip_step();                                             // it writes nothing
  void note_state(std::uint64_t number);                        // that others find if there is no step after this one
  void resume_step(std::uint64_t number) { number_ = number; }  // that others have begun

  // Puts in its place what killed threads had ready in chunks [first, last).
  void put_what_is_ready(const UpdateRule& rule, const std::vector<Chunk>& chunks, std::size_t first, std::size_t last);

  // A pass over the chunks begins, in which each thread that takes part calls begin_chunks() once.
  void begin_pass() {
    if (journal_) journal_->begin_pass();
  }
  RedoSlot* begin_chunks() { return journal_ ? &journal_->take_slot() : nullptr; }

  bool is_done(std::size_t chunk, ChunkPhase phase) const {
    return journal_ && journal_->mark(chunk) >= ChunkMark(number_, phase, ChunkMark::kAll);
  }

  // Calls write_new(range, parts) for each run of the chunk, of `most` elements, that has not gone through `phase` yet: it
  // writes new values into `parts`, in the order of places_in(). Without a journal: once, for all of the chunk.
  struct Own {
    std::size_t number;  // of the chunk
    RedoSlot* redo;      // of the thread: from begin_chunks()
  };
  void write(const UpdateRule& rule, const Own& own, const Chunk& chunk, ChunkPhase phase, std::int64_t most,
             const auto& write_new) {
    if (!journal_) return write_new(chunk, places_in(rule, phase, chunk));
    std::int64_t begin = journal_->mark(own.number).elements_in(number_, phase);
    for (; begin < chunk.count; begin += most) {
      const Chunk range{chunk.parameter, chunk.begin + begin, std::min(most, chunk.count - begin)};
      const std::int64_t end = begin + range.count;
      const ChunkMark mark(number_, phase, end == chunk.count ? ChunkMark::kAll : static_cast<std::uint64_t>(end));
      const RedoSlot::Elements name{own.number, begin, range.count};
      const RedoSlot::Parts places = places_in(rule, phase, range);
      const RedoSlot::Parts beside = own.redo->begin(places);
      write_new(range, beside);
      own.redo->complete(name, mark);
      own.redo->put(places);
      journal_->set_mark(own.number, mark);
    }
  }

  // Elements that an update should write at a time where others may have to finish it: old and new values fit the first-level
  // cache.
  static constexpr std::int64_t kKeptRun = 1024;

  // A text for KeptUpdate; "" before keep(). The places without that of the journal.
  std::string manifest(ManifestPlaces places, const SharedMemory& memory) const;

 private:
  RedoSlot::Parts places_in(const UpdateRule& rule, ChunkPhase phase, const Chunk& chunk) const;

  OptimizerState& state_;
  std::uint64_t number_ = 0;  // of the step
  std::optional<JournalWriter> journal_;
};

}  // namespace lockstep
