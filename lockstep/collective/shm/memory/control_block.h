// SPDX-License-Identifier: Apache-2.0
// collective/shm/memory/control_block.h: what the ranks of a machine write for each other besides data, byte by byte.
//
//   control segment:   MachineBlock | Seat[N] | group area of all ranks
//   group area:        SharedHeader | then per rank, each part on cache lines of its own:
//                      Announcement[2] | Progress | counts[2][2N] | slot[2][kSlotBytes] |
//                      MessageHeader[N][kMessagesPerPair]
//
// Each part is written by its own rank only, except: MessageHeader (the sender fills it, the receiver answers),
// Progress::bell (anyone rings), Poison (whoever finds trouble first) and, in a reduction of a large array, the first of
// rank 0's counts (anyone takes a chunk). Parts with [2] alternate: collective number s
// uses s % 2. Its owner overwrites them in collective s+2, which it enters only after all ranks have entered s+1 and
// therefore left s.
//
// Owns:    nothing: structs over zeroed shared memory, where every bit pattern of zeroes is a valid start
// Threads: atomics; payload between a release and an acquire of a Flag
#pragma once

#include <array>
#include <bit>
#include <cstring>

#include "lockstep/base/cache_line.h"
#include "lockstep/collective/calls/call.h"
#include "lockstep/collective/shm/memory/flag.h"

namespace lockstep::shm {

inline constexpr size_t kSlotBytes = 16384;  // a rank's data in a one-shot collective
inline constexpr size_t kInlineBytes = 832;  // a message that travels inside its header
inline constexpr int kMessagesPerPair = 4;   // that one rank can leave for another without waiting

enum class Cause : uint32_t { kDied, kLeft, kStalled, kFailed };

// The reason why no collective of this machine can succeed any more. Written once.
struct alignas(kCacheLine) Poison {
  static constexpr uint32_t kClean = 0, kClaimed = 1, kWritten = 2;

  std::atomic<uint32_t> state;
  std::atomic<Cause> cause;
  std::array<char, 512> what;  // zero-terminated
  std::array<char, 3072> peer;
};

// One per rank of the machine.
struct alignas(kCacheLine) Seat {
  std::atomic<bool> left;  // in good order
  std::atomic<int32_t> pid;
  std::atomic<int32_t> job_rank;   // what the job calls it
  std::array<uint64_t, 16> cores;  // a bit for each core that the rank may use
  std::atomic<int32_t> waits_for;  // while it sleeps: the rank that it waits for, plus 1; 0: nobody in particular
  std::atomic<int64_t> looked_at;  // while it sleeps: when it last looked around, ms of the steady clock
};

struct MachineBlock {
  uint64_t staging_bytes;  // the leader's option, used by all
  Poison poison;
};

// The location of an array, in words that mean the same in every process.
struct Location {
  enum class Kind : uint8_t { kPrivate, kArena, kAddress, kSlot, kLine };
  using enum Kind;

  Kind kind = Kind::kPrivate;  // kAddress: ranks are threads of one process; kLine: in the announcement itself
  uint16_t owner = 0;          // kArena: the rank of the machine whose arena it is
  uint64_t at = 0;             // offset or address

  bool within_reach() const { return kind == kArena || kind == kAddress; }  // of peers, where it lies
};

inline Location in_arena(int arena, uint64_t offset) {
  return {.kind = Location::kArena, .owner = static_cast<uint16_t>(arena), .at = offset};
}

// Exactly one cache line: a rank's arrival at a collective and everything its peers need to know about it. All words
// are relaxed atomics: the rise of `arrived` publishes them, and after a deadline others print them while their owner
// may be writing.
struct alignas(kCacheLine) Announcement {
  static constexpr size_t kLineBytes = 24;
  static constexpr auto kRelaxed = std::memory_order_relaxed;
  using Words = std::array<uint64_t, 3>;
  using SharedWords = std::array<std::atomic<uint64_t>, 3>;
  static_assert(sizeof(Signature) == sizeof(Words) && kLineBytes == sizeof(Words));

  Flag arrived;  // the collective's number; raised last
  SharedWords signature;
  std::atomic<uint64_t> kinds;  // of both places
  SharedWords words;            // where the input and the output lie, and the longest message; kLine: the data

  void write(const Signature& call, Location input, Location output, uint64_t longest_message) {
    store(signature, std::bit_cast<Words>(call));
    kinds.store(pack_kind(input) | pack_kind(output) << 32, kRelaxed);
    store(words, {input.at, output.at, longest_message});
  }

  void write_line(const Signature& call, const std::byte* data, size_t bytes) {  // at most kLineBytes
    store(signature, std::bit_cast<Words>(call));
    kinds.store(pack_kind({.kind = Location::kLine}), kRelaxed);
    Words line{};
    if (bytes > 0) std::memcpy(line.data(), data, bytes);
    store(words, line);
  }

  void read_line(std::byte* data) const {  // kLineBytes
    const Words line = load(words);
    std::memcpy(data, line.data(), kLineBytes);
  }

  Signature read_signature() const { return std::bit_cast<Signature>(load(signature)); }
  Location input() const { return place(0); }
  Location output() const { return place(1); }
  size_t longest() const { return words[2].load(kRelaxed); }  // message that this rank has

 private:
  static uint64_t pack_kind(Location place) {
    return static_cast<uint64_t>(place.kind) | static_cast<uint64_t>(place.owner) << 8;
  }
  static void store(SharedWords& to, const Words& from) {
    for (size_t i = 0; i < from.size(); ++i) to[i].store(from[i], kRelaxed);
  }
  static Words load(const SharedWords& from) {
    return {from[0].load(kRelaxed), from[1].load(kRelaxed), from[2].load(kRelaxed)};
  }

  Location place(unsigned index) const {
    const uint64_t kind = kinds.load(kRelaxed) >> (32 * index);
    return {.kind = static_cast<Location::Kind>(kind & 0xff),
            .owner = static_cast<uint16_t>(kind >> 8 & 0xffff),
            .at = words[index].load(kRelaxed)};
  }
};
static_assert(sizeof(Announcement) == kCacheLine);

// Flags that are raised inside a collective and between collectives.
struct Progress {
  alignas(kCacheLine) Flag phase;  // steps done, over all collectives of the group
  std::atomic<uint32_t> accesses;  // ranks as threads: how many of this one's calls use peers' memory now
  std::atomic<uint64_t> staging;   // where in this rank's arena its staging memory is
  alignas(kCacheLine) Flag bell;   // rung whenever a message from or to this rank changes
};

// A message from one rank to another: what it is, where its data lies, and how far both sides are.
struct alignas(kCacheLine) MessageHeader {
  static constexpr uint32_t kFree = 0, kSent = 1, kTaken = 2, kAnswered = 3;

  std::atomic<uint32_t> state;    // kFree, sender: kSent, receiver: kTaken, then kFree or (sender waits) kAnswered
  std::atomic<uint32_t> order;    // counts the messages of this pair: tags are served first in, first out
  std::atomic<uint32_t> filled;   // staged: chunks that the sender wrote
  std::atomic<uint32_t> emptied;  // staged: chunks that the receiver copied
  int64_t tag;
  uint64_t count;
  DType dtype;
  bool refused;      // the receiver wanted something else
  Location place;    // kSlot: in `data`; kPrivate: staged, a few chunks in turn at `at` in the owner's arena
  Signature wanted;  // what the receiver wanted instead
  alignas(kCacheLine) std::array<std::byte, kInlineBytes> data;
};

// Note [Shared memory of one rank]
// Memory of one rank's arena that others use, too, begins with the number of ranks that have not released it yet. Its
// owner may return it to the arena only when that is 0, so Peers::retire() keeps it and looks again whenever there is
// more of it.
struct alignas(kCacheLine) SharedHeader {
  std::atomic<uint32_t> users;
};

// Finds the parts of a group area.
class GroupArea {
 public:
  GroupArea(std::byte* base, int size) : base_(base), layout_(size) {}

  static size_t bytes(int size) { return sizeof(SharedHeader) + static_cast<unsigned>(size) * Layout(size).bytes; }

  SharedHeader& header() const { return *reinterpret_cast<SharedHeader*>(base_); }
  Announcement& announcement(int rank, uint32_t sequence) const { return at<Announcement>(rank, 0)[sequence % 2]; }
  Progress& progress(int rank) const { return *at<Progress>(rank, layout_.progress); }
  // Sent to each, then received from each.
  uint64_t* counts(int rank, uint32_t sequence) const {
    return at<uint64_t>(rank, layout_.counts + sequence % 2 * layout_.counts_stride);
  }
  std::byte* slot(int rank, uint32_t sequence) const {
    return at<std::byte>(rank, layout_.slot + sequence % 2 * kSlotBytes);
  }
  MessageHeader& message(int from, int to, int index) const {
    return at<MessageHeader>(to, layout_.messages)[from * kMessagesPerPair + index];
  }

 private:
  // Offsets inside the part of one rank, for groups of `size` ranks.
  struct Layout {
    explicit Layout(int size) {
      const auto ranks = static_cast<unsigned>(size);
      progress = 2 * sizeof(Announcement);
      counts = progress + sizeof(Progress);
      counts_stride = round_up(2 * ranks * sizeof(uint64_t), kCacheLine);
      slot = counts + 2 * counts_stride;
      messages = slot + 2 * kSlotBytes;
      bytes = messages + ranks * kMessagesPerPair * sizeof(MessageHeader);
    }
    size_t progress, counts, counts_stride, slot, messages, bytes;
  };

  template <class T>
  T* at(int rank, size_t offset) const {
    return reinterpret_cast<T*>(base_ + sizeof(SharedHeader) + static_cast<unsigned>(rank) * layout_.bytes + offset);
  }

  std::byte* base_;
  Layout layout_;
};

}  // namespace lockstep::shm
