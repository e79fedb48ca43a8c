#include "lockstep/collective/shm/memory/control_block.h"

#include <cstring>

#include "lockstep/base/text.h"

namespace lockstep::shm {
namespace {

constexpr auto kRelaxed = std::memory_order_relaxed;

std::uint64_t pack(const Intent& intent) {
  return static_cast<std::uint64_t>(intent.operation) | static_cast<std::uint64_t>(intent.dtype) << 8 |
         static_cast<std::uint64_t>(intent.op) << 16 | static_cast<std::uint64_t>(intent.algorithm) << 24 |
         static_cast<std::uint64_t>(static_cast<std::uint32_t>(intent.root)) << 32;
}

std::uint64_t pack_kind(Place place) {
  return static_cast<std::uint64_t>(place.kind) | static_cast<std::uint64_t>(place.owner) << 8;
}

std::string root_of(const Intent& intent) { return intent.root < 0 ? "" : concat(" with root ", intent.root); }

std::string how(const Intent& intent) {
  switch (intent.operation) {
    case Operation::kAllReduce:
      if (intent.algorithm != Algorithm::kDirect)
        return concat(" (", to_string(intent.op), ", ", to_string(intent.algorithm), ")");
      [[fallthrough]];
    case Operation::kReduce:
    case Operation::kReduceScatter: return concat(" (", to_string(intent.op), ")");
    default: return intent.shape != 0 ? " in uneven parts" : "";
  }
}

}  // namespace

std::string to_string(const Intent& intent) {
  if (intent.operation == Operation::kNone || intent.operation == Operation::kBarrier ||
      intent.operation == Operation::kSubgroup)
    return to_string(intent.operation);
  return concat(to_string(intent.operation), " of ", intent.count, " ", to_string(intent.dtype), how(intent),
                root_of(intent));
}

void Announcement::write_intent(const Intent& what) {
  intent[0].store(pack(what), kRelaxed);
  intent[1].store(what.count, kRelaxed);
  intent[2].store(what.shape, kRelaxed);
}

void Announcement::write(const Intent& what, Place input, Place output, std::uint64_t longest_message) {
  write_intent(what);
  kinds.store(pack_kind(input) | pack_kind(output) << 32, kRelaxed);
  words[0].store(input.at, kRelaxed);
  words[1].store(output.at, kRelaxed);
  words[2].store(longest_message, kRelaxed);
}

void Announcement::write_line(const Intent& what, const std::byte* data, std::size_t bytes) {
  write_intent(what);
  kinds.store(pack_kind({.kind = Place::Kind::kLine}), kRelaxed);
  std::array<std::uint64_t, 3> line{};
  if (bytes > 0) std::memcpy(line.data(), data, bytes);
  for (std::size_t i = 0; i < line.size(); ++i) words[i].store(line[i], kRelaxed);
}

void Announcement::read_line(std::byte* data) const {
  std::array<std::uint64_t, 3> line{};
  for (std::size_t i = 0; i < line.size(); ++i) line[i] = words[i].load(kRelaxed);
  std::memcpy(data, line.data(), kLineBytes);
}

bool Announcement::says(const Intent& what) const {
  return intent[0].load(kRelaxed) == pack(what) && intent[1].load(kRelaxed) == what.count &&
         intent[2].load(kRelaxed) == what.shape;
}

Intent Announcement::read_intent() const {
  const std::uint64_t packed = intent[0].load(kRelaxed);
  return {.operation = static_cast<Operation>(packed & 0xff),
          .dtype = static_cast<DType>(packed >> 8 & 0xff),
          .op = static_cast<ReduceOp>(packed >> 16 & 0xff),
          .algorithm = static_cast<Algorithm>(packed >> 24 & 0xff),
          .root = static_cast<std::int32_t>(packed >> 32),
          .count = intent[1].load(kRelaxed),
          .shape = intent[2].load(kRelaxed)};
}

Place Announcement::read_place(int index) const {
  const std::uint64_t kind = kinds.load(kRelaxed) >> (32 * index);
  return {.kind = static_cast<Place::Kind>(kind & 0xff),
          .owner = static_cast<std::uint16_t>(kind >> 8 & 0xffff),
          .at = words[static_cast<std::size_t>(index)].load(kRelaxed)};
}

// Offsets inside the part of one rank, for groups of `size` ranks.
struct GroupArea::Layout {
  explicit Layout(std::size_t size) {
    progress = 2 * sizeof(Announcement);
    counts = progress + sizeof(Progress);
    counts_stride = round_up(2 * size * sizeof(std::uint64_t), kCacheLine);
    slot = counts + 2 * counts_stride;
    letters = slot + 2 * kSlotBytes;
    bytes = letters + size * kLettersPerPair * sizeof(Letter);
  }
  std::size_t progress, counts, counts_stride, slot, letters, bytes;
};

std::size_t GroupArea::bytes(int size) {
  const auto ranks = static_cast<std::size_t>(size);
  return sizeof(GroupHeader) + ranks * Layout(ranks).bytes;
}

std::byte* GroupArea::of(int rank) const {
  return base_ + sizeof(GroupHeader) + static_cast<std::size_t>(rank) * Layout(size_).bytes;
}

Announcement& GroupArea::announcement(int rank, std::uint32_t sequence) const {
  return reinterpret_cast<Announcement*>(of(rank))[sequence % 2];
}

Progress& GroupArea::progress(int rank) const {
  return *reinterpret_cast<Progress*>(of(rank) + Layout(size_).progress);
}

std::uint64_t* GroupArea::counts(int rank, std::uint32_t sequence) const {
  const Layout layout(size_);
  return reinterpret_cast<std::uint64_t*>(of(rank) + layout.counts + sequence % 2 * layout.counts_stride);
}

std::byte* GroupArea::slot(int rank, std::uint32_t sequence) const {
  return of(rank) + Layout(size_).slot + sequence % 2 * kSlotBytes;
}

Letter& GroupArea::letter(int from, int to, int index) const {
  auto* letters = reinterpret_cast<Letter*>(of(to) + Layout(size_).letters);
  return letters[from * kLettersPerPair + index];
}

}  // namespace lockstep::shm
