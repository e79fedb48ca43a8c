// Ranks as processes that are killed, stopped, or fail, at random moments inside collectives: every survivor throws
// PeerLost in time. LOCKSTEP_FAULT_ROUNDS sets how many rounds of each (default 4).
#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>

#include <atomic>
#include <cstdlib>
#include <random>

#include "lockstep/base/text.h"
#include "lockstep/base/unique_fd.h"
#include "tests/shm/support.h"

namespace lockstep::shm {
namespace {

using testing::exit_code_of;
using testing::fork_child;
using testing::soon;

int rounds() {
  const char* const text = std::getenv("LOCKSTEP_FAULT_ROUNDS");
  int value = 4;
  if (text != nullptr) parse_int(text, value);
  return value;
}

enum class Fault { kKill, kStop, kExit, kThrow };

constexpr int kLost = 10;  // exit code: PeerLost that names the victim
constexpr auto kStallTimeout = std::chrono::milliseconds(300);

// What the test and its ranks share.
struct Board {
  std::atomic<int> calls;                              // that the victim made
  std::atomic<std::int64_t> fault_at;                  // nanoseconds of the steady clock
  std::array<std::atomic<std::int64_t>, 16> error_at;  // of each survivor
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

std::int64_t now() { return std::chrono::steady_clock::now().time_since_epoch().count(); }

void one_call(Group& group, int call, Memory& arena, std::vector<float>& ordinary) {
  const std::size_t count = call % 3 == 0 ? 10 : 40000;
  switch (call % 4) {
    case 0:
      return group.all_reduce(
          {.input = ordinary.data(), .output = ordinary.data(), .count = count, .op = ReduceOp::kMax});
    case 1:
      return group.all_reduce({.input = arena.data(), .output = arena.data(), .count = count, .op = ReduceOp::kMax});
    case 2: return group.broadcast({.data = ordinary.data(), .count = count, .root = call % group.size()});
    default: return group.barrier();
  }
}

void commit(Fault fault, const SharedBoard& board) {
  board->fault_at.store(now());
  switch (fault) {
    case Fault::kKill: ::kill(::getpid(), SIGKILL); break;
    case Fault::kStop: ::kill(::getpid(), SIGSTOP); break;
    case Fault::kExit: ::_exit(3);
    case Fault::kThrow: throw std::runtime_error("the victim's own error");
  }
}

int run_until_fault(Group& group, Fault fault, int victim, int last_call, const SharedBoard& board) {
  Memory arena = group.allocate(40000 * sizeof(float));
  std::vector<float> ordinary(40000);
  try {
    for (int call = 0;; ++call) {
      if (group.rank() == victim && call == last_call) commit(fault, board);
      one_call(group, call, arena, ordinary);
      if (group.rank() == victim) board->calls.store(call);
    }
  } catch (const PeerLost& error) {
    board->error_at[static_cast<std::size_t>(group.rank())].store(now());
    const std::string message = error.what();
    const bool named = message.find(concat("rank ", victim)) != std::string::npos;
    if (!named) std::fprintf(stderr, "%s\n", error.what());
    return named ? kLost : 1;
  }
}

void run_round(Fault fault, unsigned seed) {
  std::mt19937 random(seed);
  const int size = 2 + static_cast<int>(random() % 3);
  const int victim = static_cast<int>(random() % static_cast<unsigned>(size));
  const int last_call = static_cast<int>(random() % 400);
  SCOPED_TRACE(concat("seed ", seed, ": ", size, " ranks, victim ", victim, ", call ", last_call));
  const SharedBoard board;
  const Options options{.timeout = fault == Fault::kStop ? kStallTimeout : std::chrono::milliseconds(20000),
                        .staging_bytes = 8192};
  Host host(size, options);
  std::vector<pid_t> pids;
  for (int rank = 0; rank < size; ++rank)
    pids.push_back(fork_child([&, rank] {
      Group group = rank == 0 ? host.connect(soon()) : join_host(host.address(), rank, size, soon(), options);
      return run_until_fault(group, fault, victim, last_call, board);
    }));
  for (int rank = 0; rank < size; ++rank) {
    if (rank == victim) continue;
    EXPECT_EQ(exit_code_of(pids[static_cast<std::size_t>(rank)]), kLost);
    const double late = static_cast<double>(board->error_at[static_cast<std::size_t>(rank)] - board->fault_at) / 1e9;
    const double bound = fault == Fault::kStop ? 0.3 + 0.2 : 0.1;
    EXPECT_LT(late, bound * LOCKSTEP_TEST_PATIENCE) << "rank " << rank;
  }
  ::kill(pids[static_cast<std::size_t>(victim)], SIGKILL);
  exit_code_of(pids[static_cast<std::size_t>(victim)]);
}

class Faults : public ::testing::TestWithParam<Fault> {};
std::string name_of(const ::testing::TestParamInfo<Fault>& fault) {
  static constexpr std::array kNames{"kill", "stop", "exit", "throw"};
  return kNames[static_cast<std::size_t>(fault.param)];
}
INSTANTIATE_TEST_SUITE_P(Shm, Faults, ::testing::Values(Fault::kKill, Fault::kStop, Fault::kExit, Fault::kThrow),
                         name_of);

TEST_P(Faults, every_survivor_names_the_victim_in_time) {
  const unsigned seed = std::random_device{}();
  for (int round = 0; round < rounds(); ++round) run_round(GetParam(), seed + static_cast<unsigned>(round));
}

TEST(faults, the_error_says_how_the_peer_ended) {
  Host host(2);
  const pid_t peer = fork_child([&] {
    Group group = join_host(host.address(), 1, 2, soon());
    group.barrier();
    return ::kill(::getpid(), SIGKILL);
  });
  Group group = host.connect(soon());
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
  Host host(2);
  const pid_t peer = fork_child([&] {
    Group group = join_host(host.address(), 1, 2, soon());
    return 0;  // without leave()
  });
  Group group = host.connect(soon());
  float value = 0;
  for (int i = 0; i < 3; ++i) {
    EXPECT_THROW(group.barrier(), PeerLost);
    EXPECT_THROW(group.send({.data = &value, .count = 1, .to = 1}), PeerLost);
  }
  EXPECT_EQ(exit_code_of(peer), 0);
}

}  // namespace
}  // namespace lockstep::shm
