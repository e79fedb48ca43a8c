// SPDX-License-Identifier: Apache-2.0
// observe/job_page.h: the state of each rank of a job on this machine: a record per rank in memory that the launcher makes
// before it starts them, that the ranks write, and that any process of the same user may read. A rank that another launcher
// has started, or nobody, makes a page for itself alone.
//
// Flow:    rank_progress.h in every rank -> here -> HangWatch in the launcher, `lockstep top` (cli/top/jobs.h)
// Owns:    an anonymous file (memfd), which disappears with the last process that maps it
// Threads: any: what changes is atomic. A reader may see one field older than another
// Ranks:   they find it through LOCKSTEP_PAGE="/proc/PID/fd/N SEAT". A seat is the number of a rank on its machine; it
//          stays the same when ranks are lost and the others renumbered
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <span>
#include <string>
#include <utility>

#include "lockstep/base/cache_line.h"
#include "lockstep/base/files/unique_fd.h"
#include "lockstep/base/names.h"

namespace lockstep {

enum class Phase : uint32_t {
  kStarting,  // until it meets the other ranks
  kMeeting,
  kOwnCode,  // none of the others: in a program of one's own also what is between two steps
  kLoading,  // waits for its next batch
  kForward,
  kBackward,
  kExchange,
  kUpdate,
  kValidating,
  kSaving,
  kEnded,
};
template <>
inline constexpr auto kNames<Phase> = in_order<Phase>({"starting", "meeting", "own code", "loading", "forward",
                                                       "backward", "exchange", "update", "validating", "saving",
                                                       "ended"});
constexpr size_t kPhases = kNames<Phase>.size();

constexpr int32_t kAnyPeer = -1;    // of RankRecord::waits_for
constexpr int32_t kOwnThread = -2;  // a thread of the same process: never on the page

// Time that a rank has waited for one other.
struct WaitForPeer {
  std::atomic<int32_t> pid{0};  // 0: nobody yet
  std::atomic<int64_t> ns{0};
};
constexpr size_t kPeersWaitedFor = 64;

// State of a rank that is a server of a kvstore. Running sums; its threads, one per client, add to them.
struct ServerRecord {
  std::atomic<int32_t> clients{0};     // 0: the rank is no server
  std::atomic<int32_t> in_hand{0};     // requests that have come and are not answered
  std::atomic<int64_t> requests{0};    // answered
  std::atomic<int64_t> ns_in_hand{0};  // of those: from the request's header to its answer, summed
  std::atomic<int64_t> gradients{0};   // applied
  std::atomic<int64_t> delays{0};      // of those, summed
  std::atomic<int64_t> most_delay{0};
};

// `lockstep trace JOB` writes `until`; the rank, which looks at it once a step, the rest. Times as below.
struct TraceRecord {
  std::atomic<int64_t> until{0};    // the rank records while it is not yet so late; 0: nothing is asked
  std::atomic<int64_t> began{0};    // the last trace
  std::atomic<int64_t> ended{0};    // the last trace
  std::atomic<int64_t> refused{0};  // because it records for somebody else, or has no room
  std::atomic<int32_t> fd{-1};      // of the ring, in the rank's process
};

// Written by one rank, but for job_rank and trace.until. Times are ns of CLOCK_MONOTONIC. What every step touches stands before the
// long arrays, so that it needs few cache lines.
struct alignas(kCacheLine) RankRecord {
  std::atomic<int32_t> pid{0};         // 0: the rank has not used lockstep yet
  std::atomic<int32_t> job_rank{0};    // set by the launcher
  std::atomic<int32_t> generation{0};  // how often the job had replaced ranks when this one met the others
  std::atomic<Phase> phase{Phase::kStarting};
  std::atomic<int64_t> step{-1};         // from 0; -1: none yet
  std::atomic<uint64_t> moves{0};        // grows with every phase and every call of a collective
  std::atomic<int64_t> phase_since{0};   // 0: not begun
  std::atomic<int64_t> wait_since{0};    // 0: waits for no rank of this machine
  std::atomic<int64_t> looked_at{0};     // a rank that waits looks around every few ms, while it is not stopped
  std::atomic<int32_t> waits_for{0};     // the pid of a rank, or kAnyPeer
  std::atomic<int32_t> calls_others{0};  // it is in this many calls that other machines take part in

  std::atomic<int64_t> samples{0};          // of all steps
  std::atomic<double> loss{0};              // of the last step
  std::atomic<int32_t> loader_workers{-1};  // of its newest loader; -1: none
  TraceRecord trace;

  // Running sums. Those of the phases have nothing yet of the present one.
  std::array<std::atomic<int64_t>, kPhases> ns_in_phase{};
  std::array<std::atomic<int64_t>, kPhases> ns_waited{};  // of these, for ranks of this machine
  std::array<WaitForPeer, kPeersWaitedFor> waited_for{};  // the same, by rank; of the first so many
  ServerRecord server;
};

struct JobPageHeader {
  static constexpr uint64_t kMagic = 0x45474150504b434c;  // "LCKPPAGE"
  static constexpr uint32_t kVersion = 3;

  uint64_t magic = kMagic;
  uint32_t version = kVersion;
  uint32_t record_bytes = sizeof(RankRecord);
  int32_t launcher = 0;  // pid of whoever has made the page: a launcher, or the only rank on it
  int32_t ranks = 0;     // records that follow
  int32_t world_size = 0;
  int32_t nodes = 1;
  int32_t node_rank = 0;
  int64_t started_at = 0;       // ns since 1970
  std::array<char, 128> job{};  // name; ends with 0
};

class JobPage {
 public:
  explicit JobPage(JobPageHeader header);  // a new one, made by this process, now; throws SystemError
  // The page of a running job. Throws SystemError (none there, or not to be read by this user), DataError (no page, or
  // one of another version).
  static JobPage open(const std::string& path);
  ~JobPage();
  JobPage(JobPage&& other) noexcept
      : fd_(std::move(other.fd_)), memory_(std::exchange(other.memory_, {})), pid_(other.pid_) {}
  JobPage& operator=(JobPage&&) = delete;

  const JobPageHeader& header() const { return *reinterpret_cast<const JobPageHeader*>(memory_.data()); }
  RankRecord& record(int seat) const;
  void begin(int seat, int job_rank, int generation) const;  // before a process becomes this rank
  void end(int seat) const;                                  // it has ended
  void rename(const std::string& job, int world_size, int node_rank) const;

  std::string path() const;              // where other processes find it while this one lives
  std::string address(int seat) const;   // LOCKSTEP_PAGE of the rank at that seat: path and record
  void leave_mapped() { memory_ = {}; }  // until the process ends

 private:
  JobPage(UniqueFd fd, size_t bytes);

  UniqueFd fd_;
  std::span<std::byte> memory_;
  int pid_;
};

}  // namespace lockstep
