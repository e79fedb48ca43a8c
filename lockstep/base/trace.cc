// SPDX-License-Identifier: Apache-2.0
#include "lockstep/base/trace.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <new>

#include "lockstep/base/text.h"
#include "lockstep/base/unique_fd.h"
#include "lockstep/error.h"

namespace lockstep::trace {
namespace {

constexpr std::array<char, 16> kMagic{"lockstep ring 3"};

// A span in the ring. A reader takes it if `number` is the place's own: a span that was being written when its process
// died is left out.
struct Slot {
  std::atomic<std::uint64_t> count{0};  // spans of this process up to this one; 0: empty, or being written
  std::int64_t begin;
  std::int64_t end;
  std::int64_t number;
  std::int64_t bytes;
  std::uint64_t arrow;
  std::int32_t thread;
  Kind kind;
  Name name;
  bool arrives;
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
std::atomic<void (*)(std::int64_t now)> look_first{nullptr};  // before something is recorded in memory

std::int32_t this_thread() {
  thread_local const std::int32_t id = ::gettid();
  return id;
}

// posix_fallocate: on a full disk, writing to a mapping without it would end the process.
void* map_ring(const UniqueFd& file, std::size_t bytes, const std::string& name) {
  if (const int error = ::posix_fallocate(file.get(), 0, static_cast<off_t>(bytes)); error != 0) {
    errno = error;
    throw system_error("write the trace to", name);
  }
  void* const memory = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file.get(), 0);
  if (memory == MAP_FAILED) throw system_error("map the trace", name);
  return memory;
}

void* map_file(const std::filesystem::path& path, std::size_t bytes) {
  const UniqueFd file(::open(path.c_str(), O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0644));
  if (!file) throw system_error("write the trace to", path);
  try {
    return map_ring(file, bytes, path);
  } catch (const SystemError&) {
    ::unlink(path.c_str());
    throw;
  }
}

// The ring of open_memory(): one for all such traces, because a thread may still write to it when one ends.
struct RingInMemory {
  UniqueFd fd;
  Ring* ring = nullptr;
};
RingInMemory in_memory;

RingInMemory make_ring_in_memory() {
  UniqueFd fd(::memfd_create("lockstep-trace", MFD_CLOEXEC));
  if (!fd) throw system_error("make", "a trace in memory");
  void* const memory = map_ring(fd, Ring::bytes(kSpans), "memory");
  return {std::move(fd), new (memory) Ring{.magic = kMagic, .capacity = kSpans}};
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
          .thread = slot.thread,
          .kind = slot.kind,
          .arrow = slot.arrow,
          .arrives = slot.arrives};
}

Name cut(std::string_view name) {
  Name short_name{};
  std::copy_n(name.begin(), std::min(name.size(), short_name.size() - 1), short_name.begin());
  return short_name;
}

struct Entry {
  std::int64_t begin = 0;
  std::int64_t end = 0;
  std::int64_t number = -1;
  std::int64_t bytes = -1;
  const Name& name;
  Kind kind = Kind::kSpan;
  std::uint64_t arrow = 0;
  bool arrives = false;
};

void put(const Entry& entry) {
  if (const auto look = look_first.load(std::memory_order_relaxed)) look(entry.end);
  Ring* const to = ring.load(std::memory_order_acquire);
  if (to == nullptr) return;
  const std::uint64_t before = to->count.fetch_add(1, std::memory_order_relaxed);
  Slot& slot = to->slots()[before % to->capacity];
  slot.count.exchange(0, std::memory_order_acq_rel);  // before what follows is written
  slot.begin = entry.begin;
  slot.end = entry.end;
  slot.number = entry.number;
  slot.bytes = entry.bytes;
  slot.arrow = entry.arrow;
  slot.thread = this_thread();
  slot.kind = entry.kind;
  slot.name = entry.name;
  slot.arrives = entry.arrives;
  slot.count.store(before + 1, std::memory_order_release);
}

// The second number in /proc/self/statm, in pages.
std::int64_t resident_bytes() {
  const UniqueFd file(::open("/proc/self/statm", O_RDONLY | O_CLOEXEC));
  std::array<char, 64> text{};
  if (!file || ::read(file.get(), text.data(), text.size() - 1) <= 0) return 0;
  char* end = nullptr;
  std::strtoll(text.data(), &end, 10);
  return std::strtoll(end, nullptr, 10) * ::sysconf(_SC_PAGESIZE);
}

}  // namespace

void Span::begin(const Label& label) {
  name_ = cut(label.name);
  number_ = label.number;
  bytes_ = label.bytes;
  begin_ = now();
}

void Span::end() const { put({.begin = begin_, .end = now(), .number = number_, .bytes = bytes_, .name = name_}); }

void write(std::int64_t begin, const Label& label) {
  put({.begin = begin,
       .end = now(),
       .number = label.number,
       .bytes = label.bytes,
       .name = cut(label.name),
       .kind = label.kind,
       .arrow = label.arrow,
       .arrives = label.arrives});
}

void write_count(const char* name, std::int64_t value) {
  const std::int64_t time = now();
  put({.begin = time, .end = time, .number = value, .name = cut(name), .kind = Kind::kCounter});
}

void write_memory() {
  constexpr std::int64_t kPause = 10'000'000;
  static std::atomic<std::int64_t> last{0};
  std::int64_t before = last.load(std::memory_order_relaxed);
  const std::int64_t time = now();
  if (time - before >= kPause && last.compare_exchange_strong(before, time)) write_count("memory", resident_bytes());
}

void open(const std::filesystem::path& file, const Process& process, std::size_t spans) {
  leave_memory();
  if (is_open())
    throw UsageError({.what = "a second trace in this process",
                      .likely = "LOCKSTEP_TRACE or `lockstep run --trace`, and a Timeline of the program's own",
                      .next = "leave one of them out"});
  Ring* const made =
      new (map_file(file, Ring::bytes(spans))) Ring{.magic = kMagic, .capacity = spans, .process = process};
  ring.store(made, std::memory_order_release);
}

bool is_open() {  // by open(): that of open_memory() comes and goes
  const Ring* const now = ring.load();
  return now != nullptr && now != in_memory.ring;
}

int open_memory(const Process& process, void (*look)(std::int64_t now)) {
  if (ring.load() != nullptr)
    throw UsageError({.what = "a trace of this process is under way", .next = "wait until it has ended"});
  if (in_memory.ring == nullptr) in_memory = make_ring_in_memory();
  Ring& again = *in_memory.ring;
  again.process = process;
  again.count.store(0);
  std::for_each_n(again.slots(), again.capacity, [](Slot& slot) { slot.count.store(0, std::memory_order_relaxed); });
  ring.store(&again, std::memory_order_release);
  look_first.store(look);
  record(true);
  return in_memory.fd.get();
}

bool leave_memory() {
  const bool records = in_memory.ring != nullptr && ring.load() == in_memory.ring;
  look_first.store(nullptr);
  if (records) close();
  return records;
}

void forget_memory() {
  leave_memory();
  in_memory = {};  // its mapping stays: the parent's ring is not this process's
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
