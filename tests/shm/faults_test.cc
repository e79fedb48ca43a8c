// SPDX-License-Identifier: Apache-2.0
// Ranks as processes that are killed, stopped, that end, fail, or get no more memory or descriptors, at random moments:
// every survivor throws PeerLost in time. LOCKSTEP_FAULT_ROUNDS sets how many rounds of each (default 20).
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <poll.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdlib>
#include <random>

#include "lockstep/base/files/unique_fd.h"
#include "lockstep/base/text.h"
#include "tests/shm/support.h"
#include "tests/support.h"

namespace lockstep::shm {
namespace {

using testing::exit_code_of;
using testing::fork_child;
using testing::soon;

int fault_rounds() { return lockstep::testing::rounds("LOCKSTEP_FAULT_ROUNDS", 20); }

// kKill and kStop come from outside, at any instruction; kExit from another thread of the victim; the others between
// two instructions of a call.
enum class Fault { kKill, kStop, kExit, kThrow, kNoMemory, kFileLimit };
constexpr std::array kFaultNames{"kill", "stop", "exit", "throw", "no_memory", "file_limit"};
std::string to_string(Fault fault) { return kFaultNames[static_cast<unsigned>(fault)]; }

constexpr int kLost = 10;  // exit code: PeerLost that names the victim
constexpr auto kStallTimeout = std::chrono::milliseconds(300);

// On a busy machine some rounds take longer than others, but none comes near the deadline of 20 s.
constexpr double kAlways = 5;  // seconds
// What the test and its ranks share.
struct Board {
  std::atomic<int> calls;                         // that the victim made
  std::atomic<int64_t> fault_at;                  // nanoseconds of the steady clock
  std::array<std::atomic<int64_t>, 16> error_at;  // of each survivor
};

class SharedBoard {
 public:
  SharedBoard()
      : board_(static_cast<Board*>(
            ::mmap(nullptr, sizeof(Board), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0))) {}
  ~SharedBoard() { ::munmap(board_, sizeof(Board)); }
  Board* operator->() const { return board_; }

 private:
  Board* board_;
};

int64_t now() { return std::chrono::steady_clock::now().time_since_epoch().count(); }

void one_call(Group& group, int call, Memory& arena, std::vector<float>& ordinary) {
  const size_t count = call % 3 == 0 ? 10 : 40000;
  switch (call % 4) {
    case 0:
      group.run({.operation = Operation::kAllReduce,
                 .input = ordinary.data(),
                 .output = ordinary.data(),
                 .count = count,
                 .op = ReduceOp::kMax});
      break;
    case 1:
      group.run({.operation = Operation::kAllReduce,
                 .input = arena.data(),
                 .output = arena.data(),
                 .count = count,
                 .op = ReduceOp::kMax});
      break;
    case 2:
      group.run(
          {.operation = Operation::kBroadcast, .output = ordinary.data(), .count = count, .root = call % group.size()});
      break;
    default: group.barrier();
  }
}

// The kernel itself refuses every further fallocate of this process, as on a machine without memory.
void refuse_fallocate() {
  std::array<sock_filter, 4> program{{
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_fallocate, 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | ENOMEM),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  }};
  const sock_fprog filter{.len = program.size(), .filter = program.data()};
  if (::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 || ::prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter) != 0)
    throw system_error("refuse memory to", "this process");
}

void limit(int resource, rlim_t value) {
  const rlimit both{value, value};  // lockstep raises the soft limit on descriptors to the hard one
  ::setrlimit(static_cast<__rlimit_resource>(resource), &both);
}

// A collective for which this rank has to take memory from the machine.
void call_that_takes_memory(Group& group) {
  std::vector<float> large(size_t{1} << 21);
  group.run({.operation = Operation::kAllReduce,
             .input = large.data(),
             .output = large.data(),
             .count = large.size(),
             .algorithm = Algorithm::kRing});
}

// What the victim does to itself.
void commit(Fault fault, Group& group, unsigned seed, const SharedBoard& board) {
  if (fault == Fault::kKill || fault == Fault::kStop) return;  // the test does it
  if (fault == Fault::kExit) {
    std::thread([&board, seed] {
      std::this_thread::sleep_for(std::chrono::microseconds(seed % 500));
      board->fault_at.store(now());
      ::syscall(SYS_exit_group, 3);  // _exit of ThreadSanitizer sleeps for a second first
    }).detach();
    return;
  }
  board->fault_at.store(now());
  if (fault == Fault::kThrow) throw std::runtime_error("the victim's own error");
  if (fault == Fault::kNoMemory) refuse_fallocate();
  if (fault == Fault::kFileLimit) limit(RLIMIT_FSIZE, 4096);
  call_that_takes_memory(group);
}

struct Round {
  Fault fault;
  unsigned seed;
  int size;
  int victim;
  int last_call;  // of the victim before the fault
};

Round make_round(Fault fault, unsigned seed) {
  std::mt19937 random(seed);
  const int size = 2 + static_cast<int>(random() % 3);
  return {fault, seed, size, static_cast<int>(random() % static_cast<unsigned>(size)),
          static_cast<int>(random() % 400)};
}

// Errors name ranks as the job does.
int in_the_job(int rank) { return 20 + rank; }

int run_until_fault(Group& group, const Round& round, const SharedBoard& board) {
  Memory arena = group.allocate(40000 * sizeof(float));
  std::vector<float> ordinary(40000);
  try {
    for (int call = 0;; ++call) {
      if (group.rank() == round.victim && call == round.last_call) commit(round.fault, group, round.seed, board);
      one_call(group, call, arena, ordinary);
      if (group.rank() == round.victim) board->calls.store(call + 1);
    }
  } catch (const PeerLost& error) {
    board->error_at[static_cast<unsigned>(group.rank())].store(now());
    const std::string message = error.what();
    const bool named = message.find(concat("rank ", in_the_job(round.victim))) != std::string::npos;
    if (!named) std::fprintf(stderr, "%s\n", error.what());
    return named ? kLost : 1;
  }
}

void strike(const Round& round, pid_t victim, const SharedBoard& board) {
  if (round.fault != Fault::kKill && round.fault != Fault::kStop) return;
  const Deadline deadline = soon();
  while (board->calls.load() <= round.last_call && !deadline.passed()) ::sched_yield();
  board->fault_at.store(now());
  ::kill(victim, round.fault == Fault::kKill ? SIGKILL : SIGSTOP);
}

// Seconds until the last survivor threw.
double run_round(const Round& round) {
  SCOPED_TRACE(
      concat("seed ", round.seed, ": ", round.size, " ranks, victim ", round.victim, ", call ", round.last_call));
  const SharedBoard board;
  const Options options{.timeout = round.fault == Fault::kStop ? kStallTimeout : std::chrono::milliseconds(20000),
                        .staging_bytes = 8192,
                        .job_ranks = {in_the_job(0), in_the_job(1), in_the_job(2), in_the_job(3)}};
  RendezvousServer server(round.size, options);
  IntVector<pid_t> pids;
  for (int rank = 0; rank < round.size; ++rank)
    pids.push_back(fork_child([&, rank] {
      const GroupPtr owner =
          rank == 0 ? server.connect(soon()) : join_rendezvous(server.address(), rank, round.size, soon(), options);
      Group& group = *owner;
      return run_until_fault(group, round, board);
    }));
  const pid_t victim = pids[round.victim];
  strike(round, victim, board);
  double latest = 0;
  for (int rank = 0; rank < round.size; ++rank) {
    if (rank == round.victim) continue;
    EXPECT_EQ(exit_code_of(pids[rank]), kLost);
    const double late = static_cast<double>(board->error_at[static_cast<unsigned>(rank)] - board->fault_at) / 1e9;
    EXPECT_LT(late, kAlways) << "rank " << rank;
    latest = std::max(latest, late);
  }
  ::kill(victim, SIGKILL);
  exit_code_of(victim);
  return latest;
}

class Faults : public ::testing::TestWithParam<Fault> {};
std::string name_of(const ::testing::TestParamInfo<Fault>& fault) { return to_string(fault.param); }
INSTANTIATE_TEST_SUITE_P(Shm, Faults,
                         ::testing::Values(Fault::kKill, Fault::kStop, Fault::kExit, Fault::kThrow, Fault::kNoMemory,
                                           Fault::kFileLimit),
                         name_of);

TEST_P(Faults, every_survivor_names_the_victim_in_time) {
  const unsigned seed = std::random_device{}();
  IntVector<double> seconds;
  for (int round = 0; round < fault_rounds(); ++round)
    seconds.push_back(run_round(make_round(GetParam(), seed + static_cast<unsigned>(round))));
  std::sort(seconds.begin(), seconds.end());
  const double median = seconds[seconds.size() / 2];
  std::printf("%s: %d rounds, the last survivor threw after %.1f ms (median), %.1f ms at most\n",
              to_string(GetParam()).c_str(), fault_rounds(), median * 1e3, seconds.back() * 1e3);
}

// Those above it that are open do not count for the limit.
rlim_t lowest_free_descriptor() {
  const UniqueFd free(::dup(STDOUT_FILENO));
  return static_cast<rlim_t>(free.get());
}

// The victim may open only so many descriptors: it fails somewhere on its way, and takes nobody with it for longer than
// the deadline of the rendezvous.
double connect_with_few_descriptors(unsigned seed) {
  std::mt19937 random(seed);
  const int size = 2 + static_cast<int>(random() % 3);
  const int victim = static_cast<int>(random() % static_cast<unsigned>(size));
  const auto spare = static_cast<rlim_t>(random() % 3);
  SCOPED_TRACE(concat("seed ", seed, ": ", size, " ranks, victim ", victim, ", ", spare, " descriptors"));
  RendezvousServer server(size);
  const Stopwatch watch;
  std::vector<pid_t> pids;
  for (int rank = 0; rank < size; ++rank)
    pids.push_back(fork_child([&, rank] {
      if (rank == victim) limit(RLIMIT_NOFILE, lowest_free_descriptor() + spare);
      const Deadline deadline = Deadline::after(kStallTimeout);
      try {
        const GroupPtr owner =
            rank == 0 ? server.connect(deadline) : join_rendezvous(server.address(), rank, size, deadline);
      } catch (const Error& error) {
        return error.kind() == "SystemError" || error.kind() == "RendezvousError" ? kLost : 1;
      }
      return 0;
    }));
  for (const pid_t pid : pids) EXPECT_EQ(exit_code_of(pid), kLost);
  EXPECT_LT(watch.seconds(), kAlways);
  return watch.seconds();
}

TEST(faults, exhausted_descriptors_fail_every_rank_by_the_deadline) {
  const unsigned seed = std::random_device{}();
  double latest = 0;
  for (int round = 0; round < fault_rounds(); ++round)
    latest = std::max(latest, connect_with_few_descriptors(seed + static_cast<unsigned>(round)));
  std::printf("no_descriptors: %d rounds, every rank threw within %.1f ms (deadline: 300 ms)\n", fault_rounds(),
              latest * 1e3);
}

TEST(faults, the_error_says_how_the_peer_ended) {
  RendezvousServer server(2);
  const pid_t peer = fork_child([&] {
    const GroupPtr owner = join_rendezvous(server.address(), 1, 2, soon());
    Group& group = *owner;
    group.barrier();
    return ::kill(::getpid(), SIGKILL);
  });
  const GroupPtr owner = server.connect(soon());
  Group& group = *owner;
  group.barrier();
  try {
    group.barrier();
    ADD_FAILURE() << "no error";
  } catch (const PeerLost& error) {
    EXPECT_NE(std::string(error.what()).find(concat("rank 1, pid ", peer, ", killed by signal 9")), std::string::npos)
        << error.what();
  }
  EXPECT_EQ(exit_code_of(peer), 128 + SIGKILL);
}

TEST(faults, after_an_error_every_call_fails_at_once) {
  RendezvousServer server(2);
  const pid_t peer = fork_child([&] {
    const GroupPtr owner = join_rendezvous(server.address(), 1, 2, soon());
    return 0;  // without leave()
  });
  const GroupPtr owner = server.connect(soon());
  Group& group = *owner;
  float value = 0;
  for (int i = 0; i < 3; ++i) {
    EXPECT_THROW(group.barrier(), PeerLost);
    EXPECT_THROW(group.run({.operation = Operation::kSend, .input = &value, .count = 1, .peer = 1}), PeerLost);
  }
  EXPECT_EQ(exit_code_of(peer), 0);
}

}  // namespace
}  // namespace lockstep::shm
