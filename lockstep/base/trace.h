// SPDX-License-Identifier: Apache-2.0
// base/trace.h: what this process does when, for --trace: spans of time and counters in a ring of bounded size.
//
// Flow:    a Span around a phase, collective or batch, count() -> the ring -> Recording -> lockstep/timeline.h
// Owns:    one ring per process: a file mapping, so that its file has the last spans of a process however it ends. The
//          mapping stays until the process ends
// Threads: any; a Span is its thread's. open() and close(): one thread
// Ranks:   no communication; a process is one rank
//
// While nothing is recorded, a Span costs one load and one branch.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

namespace lockstep::trace {

inline std::int64_t now() {  // ns of CLOCK_MONOTONIC, which the processes of a machine share
  return std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1);
}

inline std::atomic<bool> recording{false};  // record() alone changes it

inline std::int64_t now_if_recording() { return recording.load(std::memory_order_relaxed) ? now() : 0; }

using Name = std::array<char, 32>;  // cut off where it is longer; ends with 0

enum class Kind : std::int32_t {
  kSpan,
  kForward,   // an operator of a module in forward(), and
  kBackward,  // its part in backward()
  kCounter,   // `number` is its value at `begin`
};

struct Label {
  std::string name;
  std::int64_t number = -1;  // -1: none; else a part of the name: "bucket 3"
  std::int64_t bytes = -1;   // -1: none
  Kind kind = Kind::kSpan;
  std::uint64_t arrow = 0;  // of a message: the same at both ends, and of no other; 0: none
  bool arrives = false;     // the arrow ends here
};

class Span {
 public:
  explicit Span(const char* name, std::int64_t number = -1) {
    if (recording.load(std::memory_order_relaxed)) begin({.name = name, .number = number});
  }
  // make_label() is called only where it is recorded.
  template <class MakeLabel>
  requires std::is_invocable_v<MakeLabel>
  explicit Span(const MakeLabel& make_label) {
    if (recording.load(std::memory_order_relaxed)) begin(make_label());
  }
  ~Span() {
    if (begin_ != 0) end();
  }
  Span(const Span&) = delete;
  Span& operator=(const Span&) = delete;

 private:
  void begin(const Label& label);
  void end() const;

  std::int64_t begin_ = 0;
  std::int64_t number_;
  std::int64_t bytes_;
  Name name_;
};

// A span from `begin`, which was now_if_recording(), until now. make_label() is called only where it is recorded.
void write(std::int64_t begin, const Label& label);
template <class MakeLabel>
requires std::is_invocable_v<MakeLabel>
void write(std::int64_t begin, const MakeLabel& make_label) {
  if (begin != 0) write(begin, make_label());
}

void write_count(const char* name, std::int64_t value);
inline void count(const char* name, std::int64_t value) {  // the counter's value from now on
  if (recording.load(std::memory_order_relaxed)) write_count(name, value);
}

// The counter "memory": bytes of this process in memory. At most every 10 ms, because reading it takes some microseconds.
void write_memory();
inline void count_memory() {
  if (recording.load(std::memory_order_relaxed)) write_memory();
}

// This clock was `offset` ns behind rank 0's at `at`.
struct ClockOffset {
  std::int64_t at = 0;
  std::int64_t offset = 0;
};

struct Process {
  std::int32_t rank = 0;
  std::int32_t pid = 0;
  std::int64_t ranks = 1;     // of its job
  std::int64_t job = 0;       // when rank 0 began, ns since 1970: the same on all ranks of a job, and of no other
  std::int64_t finished = 0;  // 1: it came to finish()
  std::array<char, 64> host{};
  std::array<ClockOffset, 2> clock{};  // at the start, and at the end; the same until then
};

constexpr std::size_t kSpans = std::size_t{1} << 16U;  // of a ring: 6.3 MB

// Makes the ring and its file. Throws SystemError: no room on the disk. UsageError: this process has a ring.
void open(const std::filesystem::path& file, const Process& process, std::size_t spans = kSpans);
void record(bool on);                                         // from now on; nothing without a ring
void finish(const std::optional<ClockOffset>& clock_at_end);  // ends recording
std::string content();                                        // of the ring: what is in its file
void close();                                                 // ends recording; the file stays
bool is_open();                                               // by open()

// For a trace that somebody else asks for while the process runs: a ring in an anonymous file, which is made once and used
// again, and records from now on. Returns the file's descriptor. An open() ends it. Throws as open(). `look` is called with
// the time whenever something is to be recorded, by any thread, and may end it.
int open_memory(const Process& process, void (*look)(std::int64_t now));
void forget_memory();  // in a forked child, which makes a ring of its own
bool leave_memory();   // ends such a recording; what it has recorded stays there. False: there is none

// ---- What a ring holds

struct RecordedSpan {
  std::string name;
  std::int64_t number = -1;
  std::int64_t bytes = -1;
  std::int64_t begin = 0;  // ns of rank 0's clock
  std::int64_t end = 0;
  std::int32_t thread = 0;
  Kind kind = Kind::kSpan;
  std::uint64_t arrow = 0;
  bool arrives = false;
};

struct Recording {
  Process process;
  std::int64_t lost = 0;  // spans that later ones have overwritten
  std::vector<RecordedSpan> spans{};
};

// Of content(), or of the file of a process that has ended. Throws DataError: not a ring, cut off, or of another version.
Recording parse(std::string_view content, const std::string& origin);

}  // namespace lockstep::trace
