// SPDX-License-Identifier: Apache-2.0
// observe/trace.h: events of this process for --trace, spans of time and counters, in a ring of bounded size.
//
// Flow:    PhaseScope, Span, count() -> the ring -> Recording -> observe/timeline_file.h
// Owns:    one ring per process: a file mapping, so that its file has the last events of a process however it ends. The
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
#include <concepts>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace lockstep::trace {

inline int64_t now() {  // ns of CLOCK_MONOTONIC, which the processes of a machine share
  return std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1);
}

inline std::atomic<bool> recording{false};  // record() alone changes it

inline bool records() { return recording.load(std::memory_order_relaxed); }
inline int64_t now_if_recording() { return records() ? now() : 0; }

// The beginning of a text, where it is longer.
struct Name : std::array<char, 32> {
  constexpr Name() : array{} {}
  constexpr Name(std::convertible_to<std::string_view> auto const& name) : array{} {
    const std::string_view text = name;
    std::copy_n(text.begin(), std::min(text.size(), size() - 1), begin());
  }
  std::string text() const { return data(); }
};

enum class Kind : int32_t {
  kSpan,
  kForward,   // an operator of a module in forward(), and
  kBackward,  // its part in backward()
  kCounter,   // `number` is its value at `begin`
};

struct Event {
  Name name;
  int64_t number = -1;  // -1: none; else a part of the name: "bucket 3"
  int64_t bytes = -1;   // -1: none
  Kind kind = Kind::kSpan;
  int32_t thread = 0;
  uint64_t flow = 0;     // of a message: the same at both ends, and of no other; 0: none
  bool arrives = false;  // the message ends here
  int64_t begin = 0;     // ns of this machine's clock; in a Recording of rank 0's
  int64_t end = 0;
};

void write(Event event);  // ends now, on this thread

template <class Make>
concept MakesEvent = requires(const Make& make) {
  { make() } -> std::same_as<Event>;
};

// Writes what make() returns as a span that has begun at `begin`, unless that is 0 (now_if_recording()).
void write(int64_t begin, const MakesEvent auto& make) {
  if (begin == 0) return;
  Event event = make();
  event.begin = begin;
  write(event);
}

class Span {
 public:
  explicit Span(const char* name, int64_t number = -1) : Span([&] { return Event{.name = name, .number = number}; }) {}
  // make() is called only where it is recorded.
  explicit Span(const MakesEvent auto& make) {
    if (!records()) return;
    event_ = make();
    event_->begin = now();
  }
  ~Span() {
    if (event_) write(*event_);
  }
  Span& operator=(Span&&) = delete;

 private:
  std::optional<Event> event_;
};

inline void count(const char* name, int64_t value) {  // the counter's value from now on
  write(now_if_recording(), [&] { return Event{.name = name, .number = value, .kind = Kind::kCounter}; });
}

void count_memory();  // the counter "memory": bytes of this process in memory; at most every 10 ms

// This clock was `offset` ns behind rank 0's at `at`.
struct ClockOffset {
  int64_t at = 0;
  int64_t offset = 0;
};

struct Process {
  int32_t rank = 0;
  int32_t pid = 0;
  int64_t ranks = 1;     // of its job
  int64_t job = 0;       // when rank 0 began, ns since 1970: the same on all ranks of a job, and of no other
  int64_t finished = 0;  // 1: it came to finish()
  std::array<char, 64> host{};
  std::array<ClockOffset, 2> clock{};  // at the start, and at the end; the same until then
};

constexpr size_t kEvents = size_t{1} << 16U;  // of a ring: 6.3 MB

// Makes the ring and its file. Throws SystemError: no room on the disk. UsageError: this process has a ring.
void open(const std::filesystem::path& file, const Process& process, size_t events = kEvents);
void record(bool on);                                         // from now on; nothing without a ring
void finish(const std::optional<ClockOffset>& clock_at_end);  // ends recording
std::string content();                                        // of the ring: what is in its file
void close();                                                 // ends recording; the file stays
bool is_open();                                               // by open()

// Called with true where recording begins, and with false where it ends: what records more than events of lockstep.
inline std::atomic<void (*)(bool)> record_more{nullptr};

// Begins a trace that somebody else asks for while the process runs: a ring in an anonymous file, which is made once and used
// again. Returns the file's descriptor. An open() ends it. Throws as open(). `look` is called with the time before something
// is recorded, by any thread, and may end it.
int open_memory(const Process& process, void (*look)(int64_t now));
void forget_memory();  // in a forked child, which makes a ring of its own
void leave_memory();   // ends such a trace; what it has recorded stays there

// ---- Reading a ring

struct Recording {
  Process process;
  int64_t lost = 0;  // events that later ones have overwritten
  std::vector<Event> events{};
};

// Reads content(), or the file of a process that has ended. Throws DataError: not a ring, cut off, or of another version.
Recording parse(std::string_view content, const std::string& origin);

}  // namespace lockstep::trace
