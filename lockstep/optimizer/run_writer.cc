// SPDX-License-Identifier: Apache-2.0
#include "lockstep/optimizer/run_writer.h"

#include <ATen/Parallel.h>

#include "lockstep/optimizer/mean.h"
#include "lockstep/optimizer/rule.h"

namespace lockstep {
namespace {

static_assert(kMaxRun < static_cast<std::int64_t>(ChunkMark::kAll));

std::size_t threads_of_update() { return static_cast<std::size_t>(at::get_num_threads()); }

// That is written at a time, at most: of a run all, of a chunk of a layerwise rule the state.
std::size_t redo_bytes_of(const OptimizerState& state, bool layerwise) {
  std::size_t most = 0;
  for (const torch::Tensor& parameter : state.parameters) {
    const std::size_t size = c10::elementSize(computed_in(parameter));
    const std::size_t lists = 1 + state.arrays.size() + (state.ema_decay > 0 ? 1 : 0);
    most = std::max(most, RunWriter::kKeptRun * (lists * size + (is_16_bit(parameter) ? 2 : 0)));
    if (layerwise) most = std::max(most, kMaxRun * state.arrays.size() * size);
  }
  return most;
}

StepRecord record_of(const UpdateStep& step, const OptimizerState& state, std::uint64_t number,
                     const std::vector<char>& is_updated, const SharedMemory& memory) {
  StepRecord record{.step = number,
                    .clipping = step.clipping,
                    .loss_scale = step.loss_scale,
                    .weights = step.gradients.weights,
                    .steps = state.steps,
                    .is_updated = is_updated};
  for (const auto& group : step.groups) record.options.push_back(own_options(group.options()).value());
  const std::size_t sources = record.weights.size();
  for (std::size_t i = 0; i < step.gradients.pointers.size(); ++i) {
    const void* const gradient = step.gradients.pointers[i];
    record.gradients.emplace_back();
    if (gradient != nullptr) record.gradients.back() = memory.locate(gradient, state.parameters[i / sources].nbytes());
  }
  return record;
}

}  // namespace

void RunWriter::keep(std::shared_ptr<SharedMemory> memory, const UpdateOptions& options, std::size_t chunks) {
  journal_.emplace(memory, JournalShape{.ranks = static_cast<std::size_t>(memory->size()),
                                        .parameters = state_.parameters.size(),
                                        .groups = options.groups,
                                        .sources = options.kept_sources,
                                        .chunks = chunks,
                                        .redo_bytes = redo_bytes_of(state_, options.layerwise)});
  journal_->make_room(threads_of_update());
  note_state(0);
  memory->barrier();
}

void RunWriter::begin_step(std::uint64_t number, const UpdateStep& step, const std::vector<char>& is_updated,
                           const SharedMemory& memory) {
  number_ = number;
  if (!journal_) return;
  journal_->make_room(threads_of_update());
  journal_->write(record_of(step, state_, number, is_updated, memory));
}

void RunWriter::skip_step() {
  if (journal_) journal_->write_skipped(number_);
}

void RunWriter::note_state(std::uint64_t number) {
  if (!journal_) return;
  const JournalShape& shape = journal_->shape();
  journal_->write({.step = number,
                   .weights = std::vector<double>(shape.sources),
                   .options = std::vector<OptimizerOptions>(shape.groups),
                   .steps = state_.steps,
                   .is_updated = std::vector<char>(shape.parameters),
                   .gradients = std::vector<std::optional<SharedMemory::Place>>(shape.parameters * shape.sources)});
}

void RunWriter::put_what_is_ready(const UpdateRule& rule, const std::vector<Chunk>& chunks, std::size_t first,
                                  std::size_t last) {
  for (RedoSlot* const slot : journal_->all_slots()) {
    const auto [i, begin, count] = slot->elements();
    const ChunkMark mark = slot->leads_to();
    if (mark == ChunkMark(0) || i < first || i >= last) continue;
    if (journal_->mark(i) < mark) {
      slot->put(places_in(rule, mark.phase(), {chunks[i].parameter, chunks[i].begin + begin, count}));
      journal_->set_mark(i, mark);
    }
    slot->clear();
  }
}

// What a phase writes: the optimizer's arrays, the average, the values that are updated, the 16-bit ones.
RedoSlot::Parts RunWriter::places_in(const UpdateRule& rule, ChunkPhase phase, const Chunk& chunk) const {
  RedoSlot::Parts parts;
  const auto add = [&](const std::vector<torch::Tensor>& arrays) {
    const std::size_t size = arrays[chunk.parameter].element_size();
    parts.add(part_of<std::byte>(arrays, {chunk.parameter, chunk.begin * static_cast<std::int64_t>(size), 0}),
              static_cast<std::size_t>(chunk.count) * size);
  };
  if (rule.directs_with_state() == (phase == ChunkPhase::kDirected)) std::ranges::for_each(state_.arrays, add);
  if (phase == ChunkPhase::kDirected) return parts;
  if (!state_.averages.empty()) add(state_.averages);
  if (is_16_bit(state_.parameters[chunk.parameter])) add(state_.masters);
  add(state_.parameters);
  return parts;
}

std::string RunWriter::manifest(ManifestPlaces places, const SharedMemory& memory) const {
  if (!journal_) return "";
  places.journal = journal_->memory();
  return manifest_of(state_, journal_->shape(), places, memory);
}

}  // namespace lockstep
