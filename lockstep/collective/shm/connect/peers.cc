// SPDX-License-Identifier: Apache-2.0
#include "lockstep/collective/shm/connect/peers.h"

#include <sched.h>
#include <sys/ioctl.h>
#include <sys/wait.h>

#include "lockstep/base/files/proc_file.h"
#include "lockstep/base/sockets/poll.h"
#include "lockstep/base/text.h"
#include "lockstep/collective/shm/thresholds.h"
#include "lockstep/cores.h"
#include "lockstep/error.h"

namespace lockstep::shm {
namespace {

// A rank that sleeps looks around a lot more often.
constexpr milliseconds kStandsStillAfter = 20 * kLongestSleep;

int64_t now_in_ms() { return std::chrono::floor<milliseconds>(Deadline::Clock::now().time_since_epoch()).count(); }

size_t seats_offset() { return round_up(sizeof(MachineBlock), kCacheLine); }
size_t area_offset(int size) { return seats_offset() + static_cast<unsigned>(size) * sizeof(Seat); }

struct Advice {
  const char* likely;
  const char* next;
};

// By Cause.
constexpr std::array<Advice, 4> kAdvice = {{
    {"out of memory, a crash, or a signal", "read that rank's last lines; start the job again"},
    {"ranks that do not make the same number of calls", "compare what the ranks call last"},
    {"a rank that is stopped, hangs or is much slower than the others",
     "look at the rank that is behind; raise the timeout if it only needs longer"},
    {"that rank threw an exception", "read that rank's error first: this one follows from it"},
}};

// From <linux/pidfd.h> of Linux 6.15: how a process ended, after its parent collected it.
struct PidfdInfo {
  uint64_t mask;
  uint64_t cgroup;
  uint32_t pid, tgid, ppid;
  std::array<uint32_t, 8> ids;
  int32_t exit_code;
};
constexpr unsigned long kGetInfo = _IOWR(0xFF, 11, PidfdInfo);
constexpr uint64_t kInfoExit = 1U << 3;

std::optional<int> status_of_collected(int pidfd) {
  PidfdInfo info{};
  info.mask = kInfoExit;
  if (::ioctl(pidfd, kGetInfo, &info) != 0 || (info.mask & kInfoExit) == 0) return std::nullopt;
  return info.exit_code;
}

// Before its parent collected it, a process is a zombie, and the last field of /proc/PID/stat is its status.
std::optional<int> status_of_zombie(pid_t pid) try {
  int status = 0;
  const auto fields = fields_of_stat(concat("/proc/", pid, "/stat"));
  return fields.front() == "Z" && parse_int(split(fields.back(), '\n').front(), status) ? std::optional(status)
                                                                                        : std::nullopt;
} catch (const SystemError&) {
  return std::nullopt;
}

std::string ending_with(int status) {
  if (WIFSIGNALED(status)) return concat("killed by signal ", WTERMSIG(status));
  return concat("exited with code ", WEXITSTATUS(status));
}

// "killed by signal 9", "exited with code 3", or "ended" where the system does not say. `pidfd` must be readable.
std::string how_it_ended(int pidfd, pid_t pid) {
  std::optional<int> status = status_of_collected(pidfd);
  if (!status) status = status_of_zombie(pid);
  if (!status) status = status_of_collected(pidfd);  // collected meanwhile
  return status ? ending_with(*status) : "ended";
}

}  // namespace

size_t control_bytes(int size) { return area_offset(size) + GroupArea::bytes(size); }

UniqueFd make_control_segment(int size, size_t staging_bytes) {
  UniqueFd fd = make_segment("control", control_bytes(size));
  const MachineBlock start{.staging_bytes = staging_bytes, .poison = {}};
  if (::pwrite(fd.get(), &start, sizeof start, 0) != static_cast<ssize_t>(sizeof start))
    throw system_error("write", "the control segment");
  return fd;
}

Peers::Peers(PeerHandles parts)
    : control_(std::move(parts.control), control_bytes(parts.memories.size()), "the control segment"),
      pidfds_(std::move(parts.pidfds)),
      share_ordinary_memory_(parts.share_ordinary_memory) {
  for (UniqueFd& memory : parts.memories)
    arenas_.push_back(std::make_shared<Arena>(std::move(memory), concat("the memory of rank ", size())));
  control_.at(0, control_bytes(size()));
}

Seat& Peers::seat(int rank) const { return reinterpret_cast<Seat*>(control_.at(seats_offset(), 0))[rank]; }

void Peers::take_seat(int rank, int job_rank) {
  Seat& mine = seat(rank);
  mine.job_rank.store(job_rank, std::memory_order_relaxed);
  mine.pid.store(::getpid(), std::memory_order_relaxed);
  for (const int core : usable_cores()) mine.cores[static_cast<unsigned>(core) / 64] |= uint64_t{1} << (core % 64);
}

bool Peers::more_ranks_than_cores() const {
  int cores = 0;
  for (size_t word = 0; word < seat(0).cores.size(); ++word) {
    uint64_t any = 0;
    for (int rank = 0; rank < size(); ++rank) any |= seat(rank).cores[word];
    cores += std::popcount(any);
  }
  return size() > cores;
}

GroupArea Peers::group_area() const { return {control_.at(area_offset(size()), 0), size()}; }

Location Peers::locate(const void* address, size_t bytes) const {
  if (share_ordinary_memory_) return {.kind = Location::kAddress, .at = reinterpret_cast<uintptr_t>(address)};
  for (int rank = 0; rank < size(); ++rank)
    if (const auto offset = arenas_[rank]->window().offset_of(address, bytes)) return in_arena(rank, *offset);
  return {};
}

std::byte* Peers::pointer(Location place, size_t bytes) const {
  if (place.kind == Location::kAddress) return reinterpret_cast<std::byte*>(place.at);
  if (place.owner >= size())
    throw SystemError({.what = concat("an address in the memory of rank ", place.owner, ", but there are ", size())});
  return arenas_[place.owner]->window().at(place.at, bytes);
}

void Peers::poison(Cause cause, const std::string& what, const std::string& peer) const {
  Poison& poison = block().poison;
  uint32_t clean = Poison::kClean;
  if (!poison.state.compare_exchange_strong(clean, Poison::kClaimed)) return;
  poison.cause.store(cause, std::memory_order_relaxed);
  what.copy(poison.what.data(), poison.what.size() - 1);  // the rest is zeroes
  peer.copy(poison.peer.data(), poison.peer.size() - 1);
  poison.state.store(Poison::kWritten, std::memory_order_release);
}

void Peers::throw_if_poisoned(const std::string& here) const {
  if (!poisoned()) return;
  const Poison& poison = block().poison;
  // The rank that claimed it is writing; if it was killed half way, there is nothing to read.
  for (int i = 0; i < 1000 && poison.state.load(std::memory_order_acquire) != Poison::kWritten; ++i) ::sched_yield();
  if (poison.state.load(std::memory_order_acquire) != Poison::kWritten)
    throw PeerLost({.what = "a rank was lost while it reported an error", .here = here});
  const Advice advice = kAdvice[static_cast<unsigned>(poison.cause.load(std::memory_order_relaxed))];
  throw PeerLost({.what = poison.what.data(),
                  .here = here,
                  .peer = poison.peer.data(),
                  .likely = advice.likely,
                  .next = advice.next});
}

void Peers::poison_if_any_died() const {
  std::vector<pollfd> polls;
  for (const UniqueFd& pidfd : pidfds_) polls.push_back(to_poll(pidfd.get()));
  if (polls.empty() || poll_for(polls, {}) <= 0) return;
  for (size_t i = 0; i < polls.size(); ++i) {
    const int rank = static_cast<int>(i);
    if (polls[i].revents == 0 || left(rank)) continue;
    const std::string ending = how_it_ended(polls[i].fd, seat(rank).pid.load(std::memory_order_relaxed));
    poison(Cause::kDied, concat(name(rank), " died: ", ending), describe(rank) + ", " + ending);
  }
}

void Peers::note_wait(int rank, int peer) const {
  seat(rank).looked_at.store(now_in_ms(), std::memory_order_relaxed);
  seat(rank).waits_for.store(peer + 1, std::memory_order_release);
}

int Peers::holds_up(int peer) const {
  int last = peer;
  for (int others = 0; others < size() && last >= 0; ++others) {
    const int next = seat(last).waits_for.load(std::memory_order_acquire) - 1;
    const bool stands_still =
        now_in_ms() - seat(last).looked_at.load(std::memory_order_relaxed) > kStandsStillAfter.count();
    if (next < 0 || stands_still) return last;
    last = next;
  }
  return peer;  // they wait for one another in a circle
}

void Peers::retire(Memory memory) {
  const std::lock_guard lock(mutex_);
  retired_.push_back(std::move(memory));
  std::erase_if(retired_, [](const Memory& each) { return each.as<SharedHeader>()->users.load() == 0; });
}

int Peers::job_rank(int rank) const { return seat(rank).job_rank.load(std::memory_order_relaxed); }

std::string Peers::name(int rank) const { return concat("rank ", job_rank(rank)); }

std::string Peers::describe(int rank) const {
  const int32_t pid = seat(rank).pid.load(std::memory_order_relaxed);
  return pid == 0 ? name(rank) : concat(name(rank), ", pid ", pid);
}

}  // namespace lockstep::shm
