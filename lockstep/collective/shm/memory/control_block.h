// collective/shm/memory/control_block.h: what the ranks of a machine write for each other besides data, byte by byte.
//
//   control segment:   MachineBlock | Seat[N] | group area of all ranks
//   group area:        GroupHeader | then per rank, each part on cache lines of its own:
//                      Announcement[2] | Progress | counts[2][2N] | slot[2][kSlotBytes] | Letter[N][kLettersPerPair]
//
// Everything of a rank is written by that rank only, except: Letter (the sender fills it, the receiver answers),
// Progress::bell (anyone rings) and Poison (the first to find trouble). Parts with [2] are used in turn: collective
// number s uses s % 2. Its owner overwrites them in collective s+2, which it only enters once all ranks have entered
// s+1, and therefore left s.
//
// Owns:    nothing: structs over zeroed shared memory, where every bit pattern of zeroes is a valid start
// Threads: atomics; payload between a release and an acquire of a Flag
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>

#include "lockstep/base/cache_line.h"
#include "lockstep/collective/shm/memory/flag.h"
#include "lockstep/collective_types.h"

namespace lockstep::shm {

inline constexpr std::size_t kSlotBytes = 16384;  // a rank's data in a one-shot collective
inline constexpr std::size_t kLetterBytes = 832;  // a message that needs no further memory
inline constexpr int kLettersPerPair = 4;         // messages that one rank can leave for another without waiting

enum class Cause : std::uint32_t { kDied, kLeft, kStalled, kFailed };

// The reason why no collective of this machine can succeed any more. Written once.
struct alignas(kCacheLine) Poison {
  static constexpr std::uint32_t kClean = 0, kClaimed = 1, kWritten = 2;

  std::atomic<std::uint32_t> state;
  std::atomic<Cause> cause;
  std::atomic<std::int32_t> rank;  // of the machine; the culprit, or who speaks for it
  std::array<char, 512> what;      // zero-terminated
  std::array<char, 3072> peer;
};

// One per rank of the machine.
struct alignas(kCacheLine) Seat {
  static constexpr std::uint32_t kEmpty = 0, kJoined = 1, kLeft = 2;

  std::atomic<std::uint32_t> state;
  std::atomic<std::int32_t> pid;
  std::atomic<std::int32_t> job_rank;   // what the job calls it
  std::array<std::uint64_t, 16> cores;  // a bit for each core that the rank may use
  std::atomic<std::int32_t> waits_for;  // while it sleeps: the rank that it waits for, plus 1; 0: nobody in particular
  std::atomic<std::int64_t> looked_at;  // while it sleeps: when it last looked around, ms of the steady clock
};

struct MachineBlock {
  std::uint32_t size;  // ranks of the machine
  std::uint32_t reserved;
  std::uint64_t staging_bytes;  // the leader's option, used by all
  Poison poison;
};

// Where an array lies, in words that mean the same in every process.
struct Place {
  enum class Kind : std::uint8_t { kPrivate, kArena, kAddress, kSlot, kLine };

  Kind kind = Kind::kPrivate;  // kAddress: ranks are threads of one process; kLine: in the announcement itself
  std::uint16_t owner = 0;     // kArena: the rank of the machine whose arena it is
  std::uint64_t at = 0;        // offset or address
};

// What a rank wants, equal on all ranks or it is an error.
struct Intent {
  Operation operation = Operation::kNone;
  DType dtype = DType::kUInt8;
  ReduceOp op = ReduceOp::kSum;
  Algorithm algorithm = Algorithm::kDirect;
  std::int32_t root = -1;   // -1: the operation has none
  std::uint64_t count = 0;  // elements
  std::uint64_t shape = 0;  // a hash of the counts, where they differ from rank to rank

  bool operator==(const Intent&) const = default;
};

std::string to_string(const Intent& intent);  // "all_reduce of 100 float32 (sum)"

// Exactly one cache line: a rank's arrival at a collective and everything its peers need to know about it.
// Relaxed atomics, because after a deadline it is read while its owner may be writing.
struct alignas(kCacheLine) Announcement {
  static constexpr std::size_t kLineBytes = 24;

  Flag arrived;  // the collective's number; raised last
  std::array<std::atomic<std::uint64_t>, 3> intent;
  std::atomic<std::uint64_t> kinds;                 // of both places
  std::array<std::atomic<std::uint64_t>, 3> words;  // where the input and the output lie, and the longest message;
                                                    // kLine: the data

  void write(const Intent& what, Place input, Place output, std::uint64_t longest_message);
  void write_line(const Intent& what, const std::byte* data, std::size_t bytes);  // at most kLineBytes
  void read_line(std::byte* data) const;                                          // kLineBytes
  Intent read_intent() const;
  Place input() const { return read_place(0); }
  Place output() const { return read_place(1); }
  std::size_t longest() const { return words[2].load(std::memory_order_relaxed); }  // message that this rank has
  bool says(const Intent& what) const;                                              // compares without unpacking

 private:
  void write_intent(const Intent& what);
  Place read_place(int index) const;
};
static_assert(sizeof(Announcement) == kCacheLine);

// Flags that are raised inside a collective and between collectives.
struct Progress {
  alignas(kCacheLine) Flag phase;       // steps done, over all collectives of the group
  std::atomic<std::uint32_t> touching;  // ranks as threads: how many of this one's calls use others' memory
  std::atomic<std::uint64_t> staging;   // where in this rank's arena its staging memory is
  alignas(kCacheLine) Flag bell;        // rung whenever a letter from or to this rank changes
};

// A message from one rank to another.
struct alignas(kCacheLine) Letter {
  static constexpr std::uint32_t kFree = 0, kSent = 1, kTaken = 2, kAnswered = 3;

  std::atomic<std::uint32_t> state;    // kFree, sender: kSent, receiver: kTaken, then kFree or (sender waits) kAnswered
  std::atomic<std::uint32_t> order;    // counts the messages of this pair: tags are served first in, first out
  std::atomic<std::uint32_t> filled;   // staged: chunks that the sender wrote
  std::atomic<std::uint32_t> emptied;  // staged: chunks that the receiver copied
  std::int64_t tag;
  std::uint64_t count;
  DType dtype;
  Place::Kind kind;  // kSlot: in `data`; kPrivate: staged, a few chunks in turn at `at`
  bool refused;      // the receiver wanted something else
  std::uint16_t owner;
  std::uint64_t at;
  Intent wanted;  // what the receiver wanted instead
  alignas(kCacheLine) std::array<std::byte, kLetterBytes> data;
};

struct alignas(kCacheLine) GroupHeader {
  std::atomic<std::uint32_t> users;  // ranks that have not left; the leader reuses the memory of a sub-group at zero
};

// Finds the parts of a group area.
class GroupArea {
 public:
  GroupArea(std::byte* base, int size) : base_(base), size_(static_cast<std::size_t>(size)) {}

  static std::size_t bytes(int size);

  GroupHeader& header() const { return *reinterpret_cast<GroupHeader*>(base_); }
  Announcement& announcement(int rank, std::uint32_t sequence) const;
  Progress& progress(int rank) const;
  std::uint64_t* counts(int rank, std::uint32_t sequence) const;  // sent to each, then received from each
  std::byte* slot(int rank, std::uint32_t sequence) const;
  Letter& letter(int from, int to, int index) const;

 private:
  struct Layout;
  std::byte* of(int rank) const;

  std::byte* base_;
  std::size_t size_;
};

}  // namespace lockstep::shm
