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

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/base/to_size.h"
#include "lockstep/step/exchange.h"
#include "lockstep/step/update/mean.h"
#include "lockstep/step/update/rule.h"
#include "lockstep/step/update/update_journal.h"

namespace lockstep {

// The input of one step. The mean gradient is divided by the loss scale and clipped before the rule gets it.
struct UpdateStep {
  const UpdateRule& rule;
  const std::vector<UpdateRule::Group>& groups;
  const WeightedGradients& gradients;
  ClippingOptions clipping{};
  std::optional<double> loss_scale{};  // given: the step is skipped on all ranks if any element on any is not finite
};

struct JournalOptions {
  size_t kept_sources = 0;  // of gradients, in memory that outlives the ranks; 0: no journal
  size_t groups = 1;
  bool layerwise = false;
};

class JournalWriter {
 public:
  explicit JournalWriter(const OptimizerState& state) : state_(state) {}

  // From here on others can finish a step. beside: all but the journal. Collective, blocks.
  void keep(SharedMemoryPtr memory, const JournalOptions& options, size_t chunks, UpdateMemory beside) {
    memory_ = std::move(memory);
    rank_ = memory_->rank();
    const JournalShape shape{.ranks = to_size(memory_->size()),
                             .parameters = state_.parameters.size(),
                             .groups = options.groups,
                             .sources = options.kept_sources,
                             .chunks = chunks,
                             .redo_bytes = redo_bytes(options.layerwise)};
    common_ = memory_->allocate_common(UpdateJournal::bytes(shape));
    journal_.emplace(common_.get(), shape);
    beside.journal = journal_->memory();
    beside_ = beside;
    make_slots();
    note_state();
    memory_->barrier();
  }

  // Goes on in the place of a rank of `lost`: begin_step() then begins its step again.
  void resume(const InterruptedUpdate& lost, int rank, uint64_t step) {
    journal_.emplace(lost.journal, lost.shape);
    find_ = lost.find;
    rank_ = rank;
    number_ = step - 1;
    slots_ = slots_of(rank);
  }

  // A step begins: writes the record that makes it count, before anything else is written.
  void begin_step(const UpdateStep& step) {
    ++number_;
    if (!journal_ || find_) return;  // the lost ranks have written the record
    make_slots();
    StepRecord record(JournalShape{});
    record.step = number_;
    record.clipping = step.clipping;
    if (step.loss_scale) record.loss_scale = *step.loss_scale;
    record.weights = step.gradients.weights;
    for (const auto& group : step.groups) record.options.push_back(own_options(group.options()).value());
    record.steps = state_.steps;
    for (size_t i = 0; const void* const gradient : step.gradients.pointers) {
      const size_t bytes = state_.parameters[i++ / record.weights.size()].nbytes();
      record.gradients.push_back(gradient == nullptr ? kNoPlace : word_of_place(memory_->locate(gradient, bytes)));
    }
    journal_->write(rank_, ++records_, record);
  }
  // It writes nothing.
  void skip_step() {
    if (journal_) journal_->write_skipped(rank_, number_);
  }
  uint64_t step() const { return number_; }  // the number of the last one

  // The state was written between two steps, by all ranks alike: others find it with the number of updates that it has now.
  void note_state() {
    if (!journal_) return;
    StepRecord record(journal_->shape());
    record.step = number_;
    record.steps = state_.steps;
    journal_->write(rank_, ++records_, record);
  }

  RedoSlot* slot_of_thread() const { return journal_ ? slots_.at(to_size(at::get_thread_num())) : nullptr; }

  bool is_done(size_t chunk, ChunkPhase phase) const {
    return journal_ && journal_->mark(chunk) >= ChunkMark(number_, phase, ChunkMark::kAll);
  }
  int64_t first_element(size_t chunk, ChunkPhase phase) const {
    if (!journal_) return 0;
    return journal_->mark(chunk).elements_in(number_, phase);
  }

  // Old and new values of a part fit the first-level cache.
  static constexpr int64_t kPartElements = 1024;
  int64_t part_elements() const { return journal_ ? kPartElements : kMaxChunk; }

  struct Part {
    RedoSlot* slot;  // of the thread
    ChunkPart elements;
    ChunkMark mark;  // of the chunk, once the part is in its targets
    Targets targets;
  };

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
  void put_ready_parts(size_t first, size_t last,
                       const std::function<Targets(const ChunkPart&, ChunkPhase)>& targets_of) {
    for (int rank = 0; rank < static_cast<int>(journal_->shape().ranks); ++rank)
      for (RedoSlot* const slot : slots_of(rank)) {
        const ChunkMark mark = slot->leads_to();
        const ChunkPart& part = slot->part();
        if (mark == ChunkMark(0) || part.chunk < first || part.chunk >= last) continue;
        if (journal_->mark(part.chunk) < mark) {
          slot->put(targets_of(part, mark.phase()));
          journal_->set_mark(part.chunk, mark);
        }
        slot->clear();
      }
  }

  // A text for InterruptedUpdate; "" before keep().
  std::string manifest() const { return journal_ ? manifest_of(state_, journal_->shape(), beside_, *memory_) : ""; }

 private:
  static_assert(kMaxChunk < ChunkMark::kAll);

  // The most bytes that are written at a time: all arrays of a part, or the state of a layerwise rule's chunk.
  size_t redo_bytes(bool layerwise) const {
    size_t most = 0;
    for (const torch::Tensor& parameter : state_.parameters) {
      const size_t size = c10::elementSize(state_dtype(parameter));
      const size_t lists = 1 + state_.arrays.size() + (state_.ema_decay > 0 ? 1 : 0);
      most = std::max(most, kPartElements * (lists * size + (is_16_bit(parameter) ? 2 : 0)));
      if (layerwise) most = std::max(most, kMaxChunk * state_.arrays.size() * size);
    }
    return most;
  }

  // A slot for each thread of an update.
  void make_slots() {
    const auto threads = to_size(at::get_num_threads());
    if (slots_.size() >= threads) return;
    SharedMemory::Own redo = memory_->allocate(threads * RedoSlot::bytes(journal_->shape().redo_bytes));
    slots_ = slots_at(redo.data.get(), threads);
    for (RedoSlot* const slot : slots_) slot->clear();
    journal_->set_slots(rank_, {memory_->locate(redo.data.get(), 1).value(), threads});
    redo_ = std::move(redo);
  }
  std::vector<RedoSlot*> slots_at(std::byte* memory, size_t count) const {
    std::vector<RedoSlot*> slots;
    for (size_t i = 0; i < count; ++i)
      slots.push_back(reinterpret_cast<RedoSlot*>(memory + i * RedoSlot::bytes(journal_->shape().redo_bytes)));
    return slots;
  }
  std::vector<RedoSlot*> slots_of(int rank) const {
    const auto [place, count] = journal_->slots(rank);
    if (count == 0) return {};
    return slots_at(find_(place, count * RedoSlot::bytes(journal_->shape().redo_bytes)), count);
  }

  const OptimizerState& state_;
  std::optional<UpdateJournal> journal_;
  int rank_ = 0;
  uint64_t number_ = 0;     // of the step
  uint64_t records_ = 0;    // written by this rank
  SharedMemoryPtr memory_;  // of keep()
  UpdateMemory beside_;
  std::shared_ptr<std::byte> common_;
  SharedMemory::Own redo_;
  InterruptedUpdate::Find find_;  // of resume()
  std::vector<RedoSlot*> slots_;  // of this rank: one for each thread
};

}  // namespace lockstep
