// SPDX-License-Identifier: Apache-2.0
#include "lockstep/observe/trace.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cmath>
#include <cstring>
#include <fstream>
#include <new>

#include "lockstep/base/files/unique_fd.h"
#include "lockstep/base/text.h"
#include "lockstep/error.h"

namespace lockstep::trace {
namespace {

constexpr std::array<char, 16> kMagic{"lockstep ring 4"};

// A reader takes an event if `count` is the place's own: one that was being written when its process died is left out.
struct Slot {
  std::atomic<uint64_t> count{0};  // events of this process up to this one; 0: empty, or being written
  Event event;
};

struct Ring {
  std::array<char, 16> magic = kMagic;
  uint64_t capacity;
  Process process{};
  std::atomic<uint64_t> count{0};  // of events since the start

  Slot* slots() { return reinterpret_cast<Slot*>(this + 1); }
  static size_t bytes(size_t events) { return sizeof(Ring) + events * sizeof(Slot); }
};

std::atomic<Ring*> ring{nullptr};
std::atomic<void (*)(int64_t now)> look_first{nullptr};

// The ring of open_memory(): one for all such traces, because a thread may still write to it when one ends.
struct RingInMemory {
  UniqueFd fd;
  Ring* ring = nullptr;
};
RingInMemory in_memory;

// posix_fallocate: on a full disk, writing to a mapping without it would end the process.
Ring* make_ring(const UniqueFd& file, size_t events, const std::string& name) {
  const size_t bytes = Ring::bytes(events);
  if (!file) throw system_error("write the trace to", name);
  if (const int error = ::posix_fallocate(file.get(), 0, static_cast<off_t>(bytes)); error != 0) {
    errno = error;
    throw system_error("write the trace to", name);
  }
  void* const memory = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file.get(), 0);
  if (memory == MAP_FAILED) throw system_error("map the trace", name);
  return new (memory) Ring{.capacity = events};
}

Ring* make_ring(const std::filesystem::path& path, size_t events) try {
  return make_ring(UniqueFd(::open(path.c_str(), O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0644)), events, path);
} catch (const SystemError&) {
  ::unlink(path.c_str());
  throw;
}

void begin(Ring* into, const Process& process) {
  into->process = process;
  ring.store(into, std::memory_order_release);
}

// Between the two measurements clocks drift evenly.
int64_t on_rank_0(const std::array<ClockOffset, 2>& clock, int64_t time) {
  const auto [start, end] = clock;
  const double part =
      end.at == start.at ? 0 : static_cast<double>(time - start.at) / static_cast<double>(end.at - start.at);
  return time + start.offset + std::llround(part * static_cast<double>(end.offset - start.offset));
}

int64_t resident_bytes() {
  int64_t pages = 0, resident_pages = 0;
  std::ifstream("/proc/self/statm") >> pages >> resident_pages;
  return resident_pages * ::sysconf(_SC_PAGESIZE);
}

}  // namespace

void write(Event event) {
  thread_local const int32_t thread = ::gettid();
  event.thread = thread;
  event.end = now();
  if (const auto look = look_first.load(std::memory_order_relaxed)) look(event.end);
  Ring* const to = ring.load(std::memory_order_acquire);
  if (to == nullptr) return;
  const uint64_t before = to->count.fetch_add(1, std::memory_order_relaxed);
  Slot& slot = to->slots()[before % to->capacity];
  slot.count.exchange(0, std::memory_order_acq_rel);  // before what follows is written
  slot.event = event;
  slot.count.store(before + 1, std::memory_order_release);
}

void count_memory() {
  constexpr int64_t kPause = 10'000'000;
  static std::atomic<int64_t> last{0};
  int64_t before = last.load(std::memory_order_relaxed);
  const int64_t time = now_if_recording();
  if (time - before >= kPause && last.compare_exchange_strong(before, time)) count("memory", resident_bytes());
}

void open(const std::filesystem::path& file, const Process& process, size_t events) {
  leave_memory();
  if (is_open())
    throw UsageError({.what = "a second trace in this process",
                      .likely = "LOCKSTEP_TRACE or `lockstep run --trace`, and a Timeline of the program's own",
                      .next = "leave one of them out"});
  begin(make_ring(file, events), process);
}

bool is_open() { return ring.load() != nullptr && ring.load() != in_memory.ring; }

int open_memory(const Process& process, void (*look)(int64_t now)) {
  if (ring.load() != nullptr)
    throw UsageError({.what = "a trace of this process is under way", .next = "wait until it has ended"});
  if (in_memory.ring == nullptr) {
    UniqueFd fd(::memfd_create("lockstep-trace", MFD_CLOEXEC));
    Ring* const made = make_ring(fd, kEvents, "memory");
    in_memory = {std::move(fd), made};
  }
  Ring& again = *in_memory.ring;
  again.count.store(0);
  std::for_each_n(again.slots(), again.capacity, [](Slot& slot) { slot.count.store(0, std::memory_order_relaxed); });
  begin(&again, process);
  look_first.store(look);
  record(true);
  return in_memory.fd.get();
}

void leave_memory() {
  look_first.store(nullptr);
  if (!is_open()) close();
}

void forget_memory() {
  if (!is_open()) recording.store(false);  // without record_more(): what it calls may be locked at a fork
  leave_memory();
  in_memory = {};  // its mapping stays: the parent's ring is not this process's
}

void record(bool on) {
  on = on && ring.load() != nullptr;
  if (recording.exchange(on) == on) return;
  if (const auto more = record_more.load()) more(on);
}

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
  std::vector<uint64_t> aligned((content.size() + 7) / 8);
  std::memcpy(aligned.data(), content.data(), content.size());
  Ring& from = *reinterpret_cast<Ring*>(aligned.data());
  if (from.magic != kMagic) refuse("not a trace, or one of another version of lockstep");
  if (from.capacity == 0 || from.capacity > content.size() || Ring::bytes(from.capacity) != content.size())
    refuse("cut off");
  const uint64_t count = from.count.load();
  const uint64_t oldest = count - std::min<uint64_t>(count, from.capacity);
  Recording found{.process = from.process, .lost = static_cast<int64_t>(oldest)};
  found.process.host.back() = 0;
  for (uint64_t i = oldest; i < count; ++i) {
    const Slot& slot = from.slots()[i % from.capacity];
    if (slot.count.load() != i + 1) continue;
    Event& event = found.events.emplace_back(slot.event);
    event.name.back() = 0;
    for (int64_t* const time : {&event.begin, &event.end}) *time = on_rank_0(from.process.clock, *time);
  }
  return found;
}

}  // namespace lockstep::trace
