// SPDX-License-Identifier: Apache-2.0
#include "lockstep/optimizer/update_journal.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>

#include <nlohmann/json.hpp>

#include "lockstep/base/text.h"
#include "lockstep/error.h"

namespace lockstep {
namespace {

constexpr int kManifestVersion = 3;
constexpr std::uint64_t kNoPlace = std::numeric_limits<std::uint64_t>::max();
constexpr int kOffsetBits = 48;

// Nothing after it is done before anything that stands before it, by the compiler or as others see it.
void in_this_order() { std::atomic_thread_fence(std::memory_order_release); }

std::uint64_t word_of_place(const std::optional<SharedMemory::Place>& place) {
  return place ? static_cast<std::uint64_t>(place->arena) << kOffsetBits | place->offset : kNoPlace;
}

std::optional<SharedMemory::Place> place_of_word(std::uint64_t place) {
  if (place == kNoPlace) return std::nullopt;
  return SharedMemory::Place{static_cast<int>(place >> kOffsetBits), place & ((std::uint64_t{1} << kOffsetBits) - 1)};
}

// Place and count in one word, so that they change together: 16 bits the arena, 36 the cache line in it, 12 the count.
constexpr int kCountBits = 12;
constexpr std::uint64_t kLineBits = kOffsetBits - kCountBits;

std::uint64_t word_of_slots(const UpdateJournal::Slots& slots) {
  const std::uint64_t line = slots.place.offset / kCacheLine;
  if (slots.count >> kCountBits != 0 || line >> kLineBits != 0)
    throw UsageError({.what = concat("an update on ", slots.count, " threads can't be kept for a lost rank"),
                      .next = "set fewer threads per rank"});
  return static_cast<std::uint64_t>(slots.place.arena) << kOffsetBits | line << kCountBits | slots.count;
}

UpdateJournal::Slots slots_of_word(std::uint64_t word) {
  const std::uint64_t line = (word >> kCountBits) & ((std::uint64_t{1} << kLineBits) - 1);
  return {{static_cast<int>(word >> kOffsetBits), line * kCacheLine}, word & ((std::uint64_t{1} << kCountBits) - 1)};
}

// Arrays in memory, one after another.
class Cursor {
 public:
  explicit Cursor(std::uintptr_t at) : at_(at) {}

  template <class T>
  std::span<T> next(std::size_t count) {
    const std::span<T> here(reinterpret_cast<T*>(at_), count);
    at_ += round_up(count * sizeof(T), sizeof(std::uint64_t));
    return here;
  }
  std::uintptr_t at() const { return at_; }

 private:
  std::uintptr_t at_;
};

}  // namespace

RedoSlot::Parts RedoSlot::begin(const Parts& places) {
  clear();
  in_this_order();
  Parts parts;
  std::byte* at = data();
  for (const std::span<std::byte>& place : std::span(places.all).first(places.count)) {
    parts.add(at, place.size());
    at += place.size();
  }
  return parts;
}

void RedoSlot::complete(const Elements& elements, ChunkMark mark) {
  chunk_.store(elements.chunk, std::memory_order_relaxed);
  begin_.store(elements.begin, std::memory_order_relaxed);
  count_.store(elements.count, std::memory_order_relaxed);
  key_.store(mark.word(), std::memory_order_release);
  in_this_order();
}

RedoSlot::Elements RedoSlot::elements() const {
  return {chunk_.load(std::memory_order_relaxed), begin_.load(std::memory_order_relaxed),
          count_.load(std::memory_order_relaxed)};
}

void RedoSlot::put(const Parts& places) const {
  const std::byte* from = data();
  for (const std::span<std::byte>& part : std::span(places.all).first(places.count)) {
    std::memcpy(part.data(), from, part.size());
    from += part.size();
  }
}

// Of one rank, before its two records, which it writes in turn: the older one holds until the newer one is complete.
struct alignas(kCacheLine) UpdateJournal::Seat {
  std::atomic<std::uint64_t> slots;  // word_of_slots(); 0: none yet
  std::array<std::atomic<std::uint64_t>, 2> number;  // of each record, from 1; 0: it is being written, or there is none
  std::atomic<std::uint64_t> skipped;                // 1 + the last step that its loss scale skipped
};

// The arrays of a record, where they are.
struct UpdateJournal::Record {
  Record(const void* memory, const JournalShape& shape) {
    Cursor cursor(reinterpret_cast<std::uintptr_t>(memory));
    step = cursor.next<std::uint64_t>(1);
    numbers = cursor.next<double>(3);
    weights = cursor.next<double>(shape.sources);
    options = cursor.next<OptimizerOptions>(shape.groups);
    steps = cursor.next<std::int64_t>(shape.parameters);
    gradients = cursor.next<std::uint64_t>(shape.parameters * shape.sources);
    is_updated = cursor.next<char>(shape.parameters);
    end = cursor.at();
  }

  static std::size_t bytes(const JournalShape& shape) {
    return round_up<std::size_t>(Record(nullptr, shape).end, kCacheLine);
  }

  std::uintptr_t end;
  std::span<std::uint64_t> step;
  std::span<double> numbers;  // clipping by norm, by value, the loss scale or NaN
  std::span<double> weights;
  std::span<OptimizerOptions> options;
  std::span<std::int64_t> steps;
  std::span<std::uint64_t> gradients;
  std::span<char> is_updated;
};

//   rank 0: Seat, Record[2] | rank 1 ... | marks
std::size_t UpdateJournal::bytes(const JournalShape& shape) {
  return shape.ranks * bytes_of_rank(shape) + shape.chunks * sizeof(std::atomic<std::uint64_t>);
}

std::size_t UpdateJournal::bytes_of_rank(const JournalShape& shape) { return sizeof(Seat) + 2 * Record::bytes(shape); }

UpdateJournal::UpdateJournal(std::byte* memory, const JournalShape& shape)
    : shape_(shape),
      memory_(memory),
      marks_(reinterpret_cast<std::atomic<std::uint64_t>*>(memory + shape.ranks * bytes_of_rank(shape))) {}

UpdateJournal::Seat& UpdateJournal::seat(int rank) const {
  return *reinterpret_cast<Seat*>(memory_ + static_cast<unsigned>(rank) * bytes_of_rank(shape_));
}

UpdateJournal::Record UpdateJournal::record(const Seat& seat, std::size_t which) const {
  return {reinterpret_cast<const std::byte*>(&seat + 1) + which * Record::bytes(shape_), shape_};
}

void UpdateJournal::write(int rank, std::uint64_t number, const StepRecord& record) {
  Seat& seat = this->seat(rank);
  const std::size_t which = number % 2;
  seat.number[which].store(0, std::memory_order_relaxed);
  in_this_order();
  const Record to = this->record(seat, which);
  to.step[0] = record.step;
  to.numbers[0] = record.clipping.max_norm;
  to.numbers[1] = record.clipping.max_value;
  to.numbers[2] = record.loss_scale.value_or(std::numeric_limits<double>::quiet_NaN());
  std::ranges::copy(record.weights, to.weights.begin());
  std::ranges::copy(record.options, to.options.begin());
  std::ranges::copy(record.steps, to.steps.begin());
  std::ranges::transform(record.gradients, to.gradients.begin(), word_of_place);
  std::ranges::copy(record.is_updated, to.is_updated.begin());
  seat.number[which].store(number, std::memory_order_release);
  in_this_order();
}

void UpdateJournal::write_skipped(int rank, std::uint64_t step) {
  seat(rank).skipped.store(1 + step, std::memory_order_release);
}

std::optional<StepRecord> UpdateJournal::newest() const {
  const Seat* newest = nullptr;
  std::uint64_t number = 0, skipped = 0;
  for (int rank = 0; rank < static_cast<int>(shape_.ranks); ++rank) {
    skipped = std::max(skipped, seat(rank).skipped.load(std::memory_order_acquire));
    for (const auto& each : seat(rank).number) {
      if (each.load(std::memory_order_acquire) <= number) continue;
      newest = &seat(rank);
      number = each.load(std::memory_order_relaxed);
    }
  }
  if (newest == nullptr) return std::nullopt;
  const Record from = this->record(*newest, number % 2);
  StepRecord record{.step = from.step[0],
                    .skipped = skipped == from.step[0] + 1,
                    .clipping = {.max_norm = from.numbers[0], .max_value = from.numbers[1]},
                    .loss_scale = {},
                    .weights = {from.weights.begin(), from.weights.end()},
                    .options = {from.options.begin(), from.options.end()},
                    .steps = {from.steps.begin(), from.steps.end()},
                    .is_updated = {from.is_updated.begin(), from.is_updated.end()},
                    .gradients = {}};
  if (!std::isnan(from.numbers[2])) record.loss_scale = from.numbers[2];
  std::ranges::transform(from.gradients, std::back_inserter(record.gradients), place_of_word);
  return record;
}

void UpdateJournal::set_slots(int rank, const Slots& slots) {
  seat(rank).slots.store(word_of_slots(slots), std::memory_order_release);
}

UpdateJournal::Slots UpdateJournal::slots(int rank) const {
  return slots_of_word(seat(rank).slots.load(std::memory_order_acquire));
}

JournalWriter::JournalWriter(std::shared_ptr<SharedMemory> memory, const JournalShape& shape)
    : memory_(std::move(memory)),
      common_(memory_->allocate_common(UpdateJournal::bytes(shape))),
      journal_(common_.get(), shape),
      rank_(memory_->rank()) {}

JournalWriter::JournalWriter(const KeptUpdate& kept, int rank)
    : find_(kept.find), journal_(kept.journal, kept.shape), rank_(rank) {
  const UpdateJournal::Slots slots = journal_.slots(rank);
  slots_ = slots_at(find_(slots.place, slots.count * RedoSlot::bytes(shape().redo_bytes)), slots.count);
}

void JournalWriter::make_room(std::size_t threads) {
  if (slots_.size() >= threads) return;
  SharedMemory::Own redo = memory_->allocate(threads * RedoSlot::bytes(shape().redo_bytes));
  slots_ = slots_at(redo.data.get(), threads);
  for (RedoSlot* const slot : slots_) slot->clear();
  journal_.set_slots(rank_, {memory_->locate(redo.data.get(), 1).value(), threads});
  redo_ = std::move(redo);
}

std::vector<RedoSlot*> JournalWriter::slots_at(std::byte* memory, std::size_t count) const {
  std::vector<RedoSlot*> slots;
  for (std::size_t i = 0; i < count; ++i)
    slots.push_back(reinterpret_cast<RedoSlot*>(memory + i * RedoSlot::bytes(shape().redo_bytes)));
  return slots;
}

std::vector<RedoSlot*> JournalWriter::all_slots() const {
  std::vector<RedoSlot*> all;
  for (int rank = 0; rank < static_cast<int>(shape().ranks); ++rank) {
    const auto [place, count] = journal_.slots(rank);
    if (count == 0) continue;
    std::ranges::copy(slots_at(find_(place, count * RedoSlot::bytes(shape().redo_bytes)), count),
                      std::back_inserter(all));
  }
  return all;
}

// ---- The manifest: a JSON object. A place is [arena, offset, bytes]; [] without bytes, null where there is none.

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

std::byte* address_of(const KeptUpdate::Find& find, const json& place) {
  if (place.empty()) return nullptr;
  return find({place[0].get<int>(), place[1].get<std::uint64_t>()}, place[2].get<std::size_t>());
}

torch::Tensor tensor_at(const KeptUpdate::Find& find, const json& place, const json& like, torch::ScalarType dtype) {
  const auto sizes = like["sizes"].get<std::vector<std::int64_t>>();
  const auto options = torch::TensorOptions().dtype(dtype);
  const auto strides = like["strides"].get<std::vector<std::int64_t>>();
  if (place.is_null()) return {};
  if (place.empty()) return torch::empty_strided(sizes, strides, options);
  return torch::from_blob(address_of(find, place), sizes, strides, options);
}

}  // namespace

std::string manifest_of(const OptimizerState& state, const JournalShape& shape, const ManifestPlaces& places,
                        const SharedMemory& memory) {
  memory.keep();  // for whoever finds what the manifest names
  json parameters = json::array();
  for (std::size_t i = 0; i < state.parameters.size(); ++i) {
    const torch::Tensor& parameter = state.parameters[i];
    json arrays = json::array();
    for (const auto& array : state.arrays) arrays.push_back(text_of(memory, array[i]));
    parameters.push_back({{"dtype", static_cast<int>(parameter.scalar_type())},
                          {"sizes", parameter.sizes().vec()},
                          {"strides", parameter.strides().vec()},
                          {"group", state.group_of[i]},
                          {"at", text_of(memory, parameter)},
                          {"arrays", arrays},
                          {"average", state.averages.empty() ? json() : text_of(memory, state.averages[i])},
                          {"master", state.masters.empty() ? json() : text_of(memory, state.masters[i])}});
  }
  return json({{"version", kManifestVersion},
               {"ranks", shape.ranks},
               {"groups", shape.groups},
               {"sources", shape.sources},
               {"chunks", shape.chunks},
               {"redo_bytes", shape.redo_bytes},
               {"ema_decay", state.ema_decay},
               {"journal", text_of(memory, places.journal)},
               {"norms", text_of(memory, places.norms)},
               {"directions", text_of(memory, places.directions)},
               {"arrays", state.arrays.size()},
               {"parameters", parameters}})
      .dump();
}

KeptUpdate::KeptUpdate(const std::string& manifest, Find given) : find(std::move(given)) {
  const json all = json::parse(manifest, nullptr, /*allow_exceptions=*/false);
  if (all.is_discarded() || all.value("version", 0) != kManifestVersion)
    throw CheckpointError({.what = "the memory that a lost rank has left was made by another version of lockstep",
                           .likely = "lockstep was installed anew while the job ran",
                           .next = "start the job again with --resume"});
  shape = {.ranks = all["ranks"],
           .parameters = all["parameters"].size(),
           .groups = all["groups"],
           .sources = all["sources"],
           .chunks = all["chunks"],
           .redo_bytes = all["redo_bytes"]};
  journal = address_of(find, all["journal"]);
  norms = address_of(find, all["norms"]);
  directions = address_of(find, all["directions"]);
  state.ema_decay = all["ema_decay"];
  state.arrays.resize(all["arrays"]);
  for (const json& each : all["parameters"]) {
    const auto dtype = static_cast<torch::ScalarType>(each["dtype"].get<int>());
    state.parameters.push_back(tensor_at(find, each["at"], each, dtype));
    const torch::ScalarType beside = state_dtype(state.parameters.back());
    state.group_of.push_back(each["group"]);
    for (std::size_t n = 0; n < state.arrays.size(); ++n)
      state.arrays[n].push_back(tensor_at(find, each["arrays"][n], each, beside));
    if (state.ema_decay > 0) state.averages.push_back(tensor_at(find, each["average"], each, beside));
    state.masters.push_back(tensor_at(find, each["master"], each, beside));
  }
  state.steps.resize(state.parameters.size());
  if (const auto record = UpdateJournal(journal, shape).newest()) state.steps = record->steps;
}

}  // namespace lockstep
