// SPDX-License-Identifier: Apache-2.0
#include "lockstep/collective/shm/memory/control_block.h"

#include <bit>
#include <cstring>

namespace lockstep::shm {
namespace {

constexpr auto kRelaxed = std::memory_order_relaxed;

std::uint64_t pack_kind(Location place) {
  return static_cast<std::uint64_t>(place.kind) | static_cast<std::uint64_t>(place.owner) << 8;
}

void store(std::array<std::atomic<std::uint64_t>, 3>& to, const Announcement::Words& from) {
  for (std::size_t i = 0; i < from.size(); ++i) to[i].store(from[i], kRelaxed);
}

Announcement::Words load(const std::array<std::atomic<std::uint64_t>, 3>& from) {
  return {from[0].load(kRelaxed), from[1].load(kRelaxed), from[2].load(kRelaxed)};
}

}  // namespace

void Announcement::write(const Signature& call, Location input, Location output, std::uint64_t longest_message) {
  store(signature, std::bit_cast<Words>(call));
  kinds.store(pack_kind(input) | pack_kind(output) << 32, kRelaxed);
  store(words, {input.at, output.at, longest_message});
}

void Announcement::write_line(const Signature& call, const std::byte* data, std::size_t bytes) {
  store(signature, std::bit_cast<Words>(call));
  kinds.store(pack_kind({.kind = Location::kLine}), kRelaxed);
  Words line{};
  if (bytes > 0) std::memcpy(line.data(), data, bytes);
  store(words, line);
}

void Announcement::read_line(std::byte* data) const {
  const Words line = load(words);
  std::memcpy(data, line.data(), kLineBytes);
}

Signature Announcement::read_signature() const { return std::bit_cast<Signature>(load(signature)); }

Location Announcement::place(unsigned index) const {
  const std::uint64_t kind = kinds.load(kRelaxed) >> (32 * index);
  return {.kind = static_cast<Location::Kind>(kind & 0xff),
          .owner = static_cast<std::uint16_t>(kind >> 8 & 0xffff),
          .at = words[index].load(kRelaxed)};
}

GroupArea::Layout::Layout(int size) {
  const auto ranks = static_cast<unsigned>(size);
  progress = 2 * sizeof(Announcement);
  counts = progress + sizeof(Progress);
  counts_stride = round_up(2 * ranks * sizeof(std::uint64_t), kCacheLine);
  slot = counts + 2 * counts_stride;
  messages = slot + 2 * kSlotBytes;
  bytes = messages + ranks * kMessagesPerPair * sizeof(MessageHeader);
}

}  // namespace lockstep::shm
