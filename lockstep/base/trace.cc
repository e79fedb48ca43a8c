// SPDX-License-Identifier: Apache-2.0
#include "lockstep/base/trace.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cmath>
#include <cstring>
#include <new>

#include "lockstep/base/text.h"
#include "lockstep/base/unique_fd.h"
#include "lockstep/error.h"

namespace lockstep::trace {
namespace {

constexpr std::array<char, 16> kMagic{"lockstep ring 1"};

// A span in the ring. A reader takes it if `number` is the place's own: a span that was being written when its process
// died is left out.
struct Slot {
  std::atomic<std::uint64_t> count{0};  // spans of this process up to this one; 0: empty, or being written
  std::int64_t begin;
  std::int64_t end;
  std::int64_t number;
  std::int64_t bytes;
  std::int32_t thread;
  Name name;
};

struct Ring {
  std::array<char, 16> magic;
  std::uint64_t capacity;
  Process process;
  std::atomic<std::uint64_t> count;  // of spans since the start

  Slot* slots() { return reinterpret_cast<Slot*>(this + 1); }
  static std::size_t bytes(std::size_t spans) { return sizeof(Ring) + spans * sizeof(Slot); }
};

std::atomic<Ring*> ring{nullptr};

std::int32_t this_thread() {
  thread_local const std::int32_t id = ::gettid();
  return id;
}

// posix_fallocate: on a full disk, writing to a mapping without it would end the process.
void* map_file(const std::filesystem::path& path, std::size_t bytes) {
  const UniqueFd file(::open(path.c_str(), O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0644));
  if (!file) throw system_error("write the trace to", path);
  if (const int error = ::posix_fallocate(file.get(), 0, static_cast<off_t>(bytes)); error != 0) {
    ::unlink(path.c_str());
    errno = error;
    throw system_error("write the trace to", path);
  }
  void* const memory = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file.get(), 0);
  if (memory == MAP_FAILED) throw system_error("map the trace", path);
  return memory;
}

// Between the two measurements clocks drift evenly.
std::int64_t on_rank_0(const std::array<ClockOffset, 2>& clock, std::int64_t time) {
  const auto [start, end] = clock;
  const double part =
      end.at == start.at ? 0 : static_cast<double>(time - start.at) / static_cast<double>(end.at - start.at);
  return time + start.offset + std::llround(part * static_cast<double>(end.offset - start.offset));
}

RecordedSpan recorded(const Slot& slot, const std::array<ClockOffset, 2>& clock) {
  return {.name = slot.name.data(),
          .number = slot.number,
          .bytes = slot.bytes,
          .begin = on_rank_0(clock, slot.begin),
          .end = on_rank_0(clock, slot.end),
          .thread = slot.thread};
}

}  // namespace

void Span::begin(const Label& label) {
  const std::size_t length = std::min(label.name.size(), name_.size() - 1);
  std::copy_n(label.name.begin(), length, name_.begin());
  name_.at(length) = 0;
  number_ = label.number;
  bytes_ = label.bytes;
  begin_ = now();
}

void Span::end() const {
  Ring* const to = ring.load(std::memory_order_acquire);
  if (to == nullptr) return;
  const std::uint64_t before = to->count.fetch_add(1, std::memory_order_relaxed);
  Slot& slot = to->slots()[before % to->capacity];
  slot.count.exchange(0, std::memory_order_acq_rel);  // before what follows is written
  slot.begin = begin_;
  slot.end = now();
  slot.number = number_;
  slot.bytes = bytes_;
  slot.thread = this_thread();
  slot.name = name_;
  slot.count.store(before + 1, std::memory_order_release);
}

void open(const std::filesystem::path& file, const Process& process, std::size_t spans) {
  Ring* const made =
      new (map_file(file, Ring::bytes(spans))) Ring{.magic = kMagic, .capacity = spans, .process = process};
  ring.store(made, std::memory_order_release);
}

void record(bool on) { recording.store(on && ring.load() != nullptr, std::memory_order_relaxed); }

void finish(const std::optional<ClockOffset>& clock_at_end) {
  record(false);
  Process& process = ring.load()->process;
  if (clock_at_end) process.clock.back() = *clock_at_end;
  process.finished = 1;
}

std::string content() {
  Ring* const from = ring.load();
  return {reinterpret_cast<const char*>(from), Ring::bytes(from->capacity)};
}

void close() {
  record(false);
  ring.store(nullptr);
}

Recording parse(std::string_view content, const std::string& origin) {
  const auto refuse = [&](const std::string& what) {
    throw DataError({.what = concat(origin, " is ", what), .next = "trace the run again"});
  };
  if (content.size() < sizeof(Ring)) refuse("too short for a trace");
  std::vector<std::uint64_t> aligned((content.size() + 7) / 8);
  std::memcpy(aligned.data(), content.data(), content.size());
  Ring& from = *reinterpret_cast<Ring*>(aligned.data());
  if (from.magic != kMagic) refuse("not a trace, or one of another version of lockstep");
  if (from.capacity == 0 || from.capacity > content.size() || Ring::bytes(from.capacity) != content.size())
    refuse("cut off");
  const std::uint64_t count = from.count.load();
  const std::uint64_t oldest = count - std::min<std::uint64_t>(count, from.capacity);
  Recording found{.process = from.process, .lost = static_cast<std::int64_t>(oldest)};
  found.process.host.back() = 0;
  for (std::uint64_t i = oldest; i < count; ++i) {
    Slot& slot = from.slots()[i % from.capacity];
    slot.name.back() = 0;
    if (slot.count.load() == i + 1) found.spans.push_back(recorded(slot, from.process.clock));
  }
  return found;
}

}  // namespace lockstep::trace
