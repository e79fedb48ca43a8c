// SPDX-License-Identifier: Apache-2.0
#include "lockstep/step/update/journal_writer.h"

#include <algorithm>

#include "lockstep/step/update/flat_update.h"
#include "lockstep/step/update/rule.h"

namespace lockstep {
namespace {

static_assert(kMaxChunk < ChunkMark::kAll);

// The most bytes that are written at a time: all arrays of a part, or the state of a layerwise rule's chunk.
std::size_t redo_bytes_of(const OptimizerState& state, bool layerwise) {
  std::size_t most = 0;
  for (const torch::Tensor& parameter : state.parameters) {
    const std::size_t size = c10::elementSize(state_dtype(parameter));
    const std::size_t lists = 1 + state.arrays.size() + (state.ema_decay > 0 ? 1 : 0);
    most = std::max(most, JournalWriter::kPartElements * (lists * size + (is_16_bit(parameter) ? 2 : 0)));
    if (layerwise) most = std::max(most, kMaxChunk * state.arrays.size() * size);
  }
  return most;
}

}  // namespace

void JournalWriter::keep(std::shared_ptr<SharedMemory> memory, const JournalOptions& options, std::size_t chunks,
                         UpdateMemory beside) {
  memory_ = std::move(memory);
  rank_ = memory_->rank();
  const JournalShape shape{.ranks = to_size(memory_->size()),
                           .parameters = state_.parameters.size(),
                           .groups = options.groups,
                           .sources = options.kept_sources,
                           .chunks = chunks,
                           .redo_bytes = redo_bytes_of(state_, options.layerwise)};
  common_ = memory_->allocate_common(UpdateJournal::bytes(shape));
  journal_.emplace(common_.get(), shape);
  beside.journal = journal_->memory();
  beside_ = beside;
  make_slots();
  note_state();
  memory_->barrier();
}

void JournalWriter::resume(const InterruptedUpdate& lost, int rank, std::uint64_t step) {
  journal_.emplace(lost.journal, lost.shape);
  find_ = lost.find;
  rank_ = rank;
  number_ = step - 1;
  slots_ = slots_of(rank);
}

void JournalWriter::begin_step(const UpdateStep& step) {
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
  for (std::size_t i = 0; const void* const gradient : step.gradients.pointers) {
    const std::size_t bytes = state_.parameters[i++ / record.weights.size()].nbytes();
    record.gradients.push_back(gradient == nullptr ? kNoPlace : word_of_place(memory_->locate(gradient, bytes)));
  }
  journal_->write(rank_, ++records_, record);
}

void JournalWriter::skip_step() {
  if (journal_) journal_->write_skipped(rank_, number_);
}

void JournalWriter::note_state() {
  if (!journal_) return;
  StepRecord record(journal_->shape());
  record.step = number_;
  record.steps = state_.steps;
  journal_->write(rank_, ++records_, record);
}

void JournalWriter::put_ready_parts(std::size_t first, std::size_t last,
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

// A slot for each thread of an update.
void JournalWriter::make_slots() {
  const auto threads = to_size(at::get_num_threads());
  if (slots_.size() >= threads) return;
  SharedMemory::Own redo = memory_->allocate(threads * RedoSlot::bytes(journal_->shape().redo_bytes));
  slots_ = slots_at(redo.data.get(), threads);
  for (RedoSlot* const slot : slots_) slot->clear();
  journal_->set_slots(rank_, {memory_->locate(redo.data.get(), 1).value(), threads});
  redo_ = std::move(redo);
}

std::vector<RedoSlot*> JournalWriter::slots_at(std::byte* memory, std::size_t count) const {
  std::vector<RedoSlot*> slots;
  for (std::size_t i = 0; i < count; ++i)
    slots.push_back(reinterpret_cast<RedoSlot*>(memory + i * RedoSlot::bytes(journal_->shape().redo_bytes)));
  return slots;
}

std::vector<RedoSlot*> JournalWriter::slots_of(int rank) const {
  const auto [place, count] = journal_->slots(rank);
  if (count == 0) return {};
  return slots_at(find_(place, count * RedoSlot::bytes(journal_->shape().redo_bytes)), count);
}

std::string JournalWriter::manifest() const {
  return journal_ ? manifest_of(state_, journal_->shape(), beside_, *memory_) : "";
}

}  // namespace lockstep
