// SPDX-License-Identifier: Apache-2.0
#include "lockstep/step/update/update_journal.h"

#include <algorithm>
#include <utility>

#include <nlohmann/json.hpp>

#include "lockstep/base/text.h"
#include "lockstep/error.h"

namespace lockstep {
namespace {

constexpr int kManifestVersion = 5;
constexpr int kOffsetBits = 48;

// Orders everything before it before everything after it, for the compiler and as others see it.
void in_this_order() { std::atomic_thread_fence(std::memory_order_release); }

// Calls field(values) for each array of a record, in the order in which they lie in memory.
void for_each_field(auto& record, const auto& field) {
  field(std::span(&record.step, 1));
  field(std::span(&record.clipping, 1));
  field(std::span(&record.loss_scale, 1));
  field(std::span(record.weights));
  field(std::span(record.options));
  field(std::span(record.steps));
  field(std::span(record.gradients));
}

// The next array of a record lies behind this one, at a multiple of 8 bytes.
size_t bytes_of_field(const auto& values) { return round_up(values.size_bytes(), sizeof(uint64_t)); }

size_t bytes_of_record(const JournalShape& shape) {
  size_t bytes = 0;
  const StepRecord record(shape);
  for_each_field(record, [&](auto values) { bytes += bytes_of_field(values); });
  return round_up(bytes, kCacheLine);
}

}  // namespace

uint64_t word_of_place(const std::optional<SharedMemory::ArenaOffset>& place) {
  return place ? static_cast<uint64_t>(place->arena) << kOffsetBits | place->offset : kNoPlace;
}

SharedMemory::ArenaOffset place_of_word(uint64_t word) {
  return {static_cast<int>(word >> kOffsetBits), word & ((uint64_t{1} << kOffsetBits) - 1)};
}

StepRecord::StepRecord(const JournalShape& shape)
    : weights(shape.sources),
      options(shape.groups),
      steps(shape.parameters),
      gradients(shape.parameters * shape.sources, kNoPlace) {}

Targets RedoSlot::begin(const Targets& targets) {
  clear();
  in_this_order();
  Targets room = targets;
  std::byte* at = data();
  for (size_t i = room.first; i < room.last; at += room.all[i++].size())
    if (!room.all[i].empty()) room.all[i] = {at, room.all[i].size()};
  return room;
}

void RedoSlot::complete(const ChunkPart& part, ChunkMark mark) {
  part_ = part;
  key_.store(mark.word(), std::memory_order_release);
  in_this_order();
}

void RedoSlot::put(const Targets& targets) const {
  const std::byte* from = data();
  for (size_t i = targets.first; i < targets.last; from += targets.all[i++].size())
    std::copy_n(from, targets.all[i].size(), targets.all[i].data());
}

// One rank's words. Behind them lie its two records, which it writes in turn: the older one holds until the newer one is complete.
struct alignas(kCacheLine) UpdateJournal::Seat {
  std::atomic<uint64_t> slots;                  // their place
  std::atomic<size_t> slot_count;               // 0: none yet
  std::array<std::atomic<uint64_t>, 2> number;  // of each record, from 1; 0: it is being written, or there is none
  std::atomic<uint64_t> skipped;                // 1 + the last step that its loss scale skipped
};

//   rank 0: Seat, record, record | rank 1 ... | marks
size_t UpdateJournal::bytes(const JournalShape& shape) {
  return shape.ranks * (sizeof(Seat) + 2 * bytes_of_record(shape)) + shape.chunks * sizeof(std::atomic<uint64_t>);
}

UpdateJournal::UpdateJournal(std::byte* memory, const JournalShape& shape)
    : shape_(shape),
      memory_(memory),
      record_bytes_(bytes_of_record(shape)),
      marks_(reinterpret_cast<std::atomic<uint64_t>*>(&seat(static_cast<int>(shape.ranks)))) {}

UpdateJournal::Seat& UpdateJournal::seat(int rank) const {
  return *reinterpret_cast<Seat*>(memory_ + static_cast<unsigned>(rank) * (sizeof(Seat) + 2 * record_bytes_));
}

std::byte* UpdateJournal::record(int rank, uint64_t number) const {
  return reinterpret_cast<std::byte*>(&seat(rank) + 1) + number % 2 * record_bytes_;
}

void UpdateJournal::write(int rank, uint64_t number, const StepRecord& record) {
  auto& own_number = seat(rank).number[number % 2];
  own_number.store(0, std::memory_order_relaxed);
  in_this_order();
  std::byte* to = this->record(rank, number);
  for_each_field(record, [&](auto values) {
    std::ranges::copy(std::as_bytes(values), to);
    to += bytes_of_field(values);
  });
  own_number.store(number, std::memory_order_release);
  in_this_order();
}

void UpdateJournal::write_skipped(int rank, uint64_t step) {
  seat(rank).skipped.store(1 + step, std::memory_order_release);
}

std::optional<StepRecord> UpdateJournal::newest() const {
  const std::byte* from = nullptr;
  uint64_t newest = 0, skipped = 0;
  for (int rank = 0; rank < static_cast<int>(shape_.ranks); ++rank) {
    skipped = std::max(skipped, seat(rank).skipped.load(std::memory_order_acquire));
    for (const auto& each : seat(rank).number) {
      const uint64_t number = each.load(std::memory_order_acquire);
      if (number <= newest) continue;
      newest = number;
      from = record(rank, number);
    }
  }
  if (from == nullptr) return std::nullopt;
  StepRecord record(shape_);
  for_each_field(record, [&](auto values) {
    std::copy_n(from, values.size_bytes(), std::as_writable_bytes(values).data());
    from += bytes_of_field(values);
  });
  record.skipped = skipped == record.step + 1;
  return record;
}

void UpdateJournal::set_slots(int rank, const Slots& slots) {
  Seat& its = seat(rank);
  its.slots.store(word_of_place(slots.place), std::memory_order_release);
  its.slot_count.store(slots.count, std::memory_order_release);
}

UpdateJournal::Slots UpdateJournal::slots(int rank) const {
  const size_t count = seat(rank).slot_count.load(std::memory_order_acquire);
  return {place_of_word(seat(rank).slots.load(std::memory_order_relaxed)), count};
}

NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(JournalShape, ranks, groups, sources, chunks, redo_bytes)

// ---- The manifest: a JSON object. A place is [arena, offset, bytes]; [] without bytes, null for no tensor.

namespace {

using nlohmann::json;

json text_of(const SharedMemory& memory, std::span<const std::byte> bytes) {
  if (bytes.empty()) return json::array();
  const auto place = memory.locate(bytes.data(), bytes.size());
  if (!place)
    throw UsageError({.what = "a parameter or a part of the optimizer's state is not in memory that the ranks share",
                      .likely = "a parameter of the optimizer that is not one of DistributedDataParallel's module",
                      .next = "give that parameter an optimizer of its own"});
  return {place->arena, place->offset, bytes.size()};
}

json text_of(const SharedMemory& memory, const torch::Tensor& tensor) {
  if (!tensor.defined()) return nullptr;
  return text_of(memory, std::span(static_cast<const std::byte*>(tensor.const_data_ptr()), tensor.nbytes()));
}

std::byte* address_of(const InterruptedUpdate::Find& find, const json& place) {
  if (place.empty()) return nullptr;
  return find({place[0].get<int>(), place[1].get<uint64_t>()}, place[2].get<size_t>());
}

torch::Tensor tensor_at(const InterruptedUpdate::Find& find, const json& place, const json& like,
                        torch::ScalarType dtype) {
  const auto sizes = like["sizes"].get<std::vector<int64_t>>();
  const auto strides = like["strides"].get<std::vector<int64_t>>();
  if (place.is_null()) return {};
  if (place.empty()) return torch::empty_strided(sizes, strides, torch::dtype(dtype));
  return torch::from_blob(address_of(find, place), sizes, strides, torch::dtype(dtype));
}

}  // namespace

std::string manifest_of(const OptimizerState& state, const JournalShape& shape, const UpdateMemory& beside,
                        const SharedMemory& memory) {
  memory.keep();  // holds what the manifest names
  json parameters = json::array();
  for (size_t i = 0; i < state.parameters.size(); ++i) {
    const torch::Tensor& parameter = state.parameters[i];
    const auto beside_it = [&](const auto& list) { return list.empty() ? json() : text_of(memory, list[i]); };
    json arrays = json::array();
    for (const auto& array : state.arrays) arrays.push_back(beside_it(array));
    parameters.push_back({{"dtype", static_cast<int>(parameter.scalar_type())},
                          {"sizes", parameter.sizes().vec()},
                          {"strides", parameter.strides().vec()},
                          {"group", state.group_of[i]},
                          {"at", text_of(memory, parameter)},
                          {"arrays", arrays},
                          {"average", beside_it(state.averages)},
                          {"master", beside_it(state.masters)}});
  }
  json all = shape;
  all.update({{"version", kManifestVersion},
              {"ema_decay", state.ema_decay},
              {"journal", text_of(memory, beside.journal)},
              {"norms", text_of(memory, beside.norms)},
              {"directions", text_of(memory, beside.directions)},
              {"arrays", state.arrays.size()},
              {"parameters", parameters}});
  return all.dump();
}

InterruptedUpdate::InterruptedUpdate(const std::string& manifest, Find given) : find(std::move(given)) {
  const json all = json::parse(manifest, nullptr, /*allow_exceptions=*/false);
  if (all.is_discarded() || all.value("version", 0) != kManifestVersion)
    throw CheckpointError({.what = "the memory that a lost rank has left was made by another version of lockstep",
                           .likely = "lockstep was installed again while the job ran",
                           .next = "start the job again with --resume"});
  shape = all;
  shape.parameters = all["parameters"].size();
  journal = address_of(find, all["journal"]);
  norms = address_of(find, all["norms"]);
  directions = address_of(find, all["directions"]);
  state.ema_decay = all["ema_decay"];
  state.arrays.resize(all["arrays"]);
  for (const json& each : all["parameters"]) {
    state.parameters.push_back(
        tensor_at(find, each["at"], each, static_cast<torch::ScalarType>(each["dtype"].get<int>())));
    const auto beside_it = [&](const json& place) {
      return tensor_at(find, place, each, state_dtype(state.parameters.back()));
    };
    state.group_of.push_back(each["group"]);
    for (size_t n = 0; n < state.arrays.size(); ++n) state.arrays[n].push_back(beside_it(each["arrays"][n]));
    if (state.ema_decay > 0) state.averages.push_back(beside_it(each["average"]));
    state.masters.push_back(beside_it(each["master"]));
  }
  state.steps.resize(state.parameters.size());
}

}  // namespace lockstep
