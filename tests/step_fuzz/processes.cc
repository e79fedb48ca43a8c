// SPDX-License-Identifier: Apache-2.0
#include "tests/step_fuzz/processes.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <stdexcept>

#include "lockstep/base/files/unique_fd.h"

namespace lockstep::fuzz {
namespace {

constexpr size_t kMostTrainers = 2, kMostOperations = 400, kMostText = 16384;
constexpr unsigned kMostSeconds = 120;  // for one rank: it is killed then

// In memory that the test, the server and the ranks share.
struct Board {
  int runs = 0;  // makes each job's name
  bool compares = false;
  std::chrono::milliseconds timeout{};
  uint64_t seed = 0;
  int ranks = 0;
  size_t trainers = 0, operations = 0;
  TrainerPlan plans[kMostTrainers];
  Operation all[kMostOperations];
  char errors[kMaxRanks][kMostText];
  char differences[kMaxRanks][kMostText];
};
static_assert(std::is_trivially_copyable_v<TrainerPlan> && std::is_trivially_copyable_v<Operation>);

void write_text(char* to, const std::string& text) { std::snprintf(to, kMostText, "%s", text.c_str()); }

Program program_on(const Board& board) {
  return {.seed = board.seed,
          .ranks = board.ranks,
          .processes = true,
          .trainers = {board.plans, board.plans + board.trainers},
          .operations = {board.all, board.all + board.operations}};
}

// As mpirun would start it: ranks of one machine that meet by the name of their job.
void set_environment(int rank, int ranks, const std::string& job) {
  for (const char* name : {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"}) ::unsetenv(name);
  for (const char* name : {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"})
    ::setenv(name, std::to_string(rank).c_str(), 1);
  for (const char* name : {"OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"})
    ::setenv(name, std::to_string(ranks).c_str(), 1);
  ::setenv("PMIX_NAMESPACE", job.c_str(), 1);
}

[[noreturn]] void be_rank(Board& board, int rank, const std::string& job) {
  ::alarm(kMostSeconds);
  set_environment(rank, board.ranks, job);
  try {
    World world = World::from_env({.timeout = board.timeout});
    const Program program = program_on(board);
    write_text(board.differences[rank],
               run_rank(program, board.compares ? expected_of(program) : AllExpected(), world));
  } catch (const std::exception& error) {
    write_text(board.errors[rank], error.what());
  }
  std::_Exit(0);
}

void run_job(Board& board) {
  const std::string job = "step-fuzz-" + std::to_string(::getpid()) + "-" + std::to_string(++board.runs);
  std::vector<pid_t> children;
  for (int rank = 0; rank < board.ranks; ++rank) {
    board.errors[rank][0] = board.differences[rank][0] = '\0';
    const pid_t child = ::fork();
    if (child == 0) be_rank(board, rank, job);
    children.push_back(child);
  }
  for (int rank = 0; rank < board.ranks; ++rank) {
    int status = 0;
    ::waitpid(children[static_cast<size_t>(rank)], &status, 0);
    if (status != 0) write_text(board.errors[rank], "the rank ended with status " + std::to_string(status));
  }
}

class Server : public ::testing::Environment {
 public:
  // In the only thread of the process: before torch has run anything.
  void SetUp() override {
    void* const memory = ::mmap(nullptr, sizeof(Board), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    int ends[2];
    ASSERT_NE(memory, MAP_FAILED);
    ASSERT_EQ(::socketpair(AF_UNIX, SOCK_STREAM, 0, ends), 0);
    board_ = new (memory) Board();
    const pid_t child = ::fork();
    if (child == 0) {
      ::close(ends[0]);
      serve(*board_, ends[1]);
    }
    ::close(ends[1]);
    socket_ = UniqueFd(ends[0]);
  }

  void TearDown() override { socket_ = UniqueFd(); }  // the server reads the end, and leaves

  Board& run(const Program& program, bool compares, std::chrono::milliseconds timeout) {
    if (program.trainers.size() > kMostTrainers || program.operations.size() > kMostOperations)
      throw std::length_error("a program that is too long for the board");
    board_->seed = program.seed;
    board_->ranks = program.ranks;
    board_->compares = compares;
    board_->timeout = timeout;
    board_->trainers = program.trainers.size();
    board_->operations = program.operations.size();
    std::ranges::copy(program.trainers, board_->plans);
    std::ranges::copy(program.operations, board_->all);
    char bell = 0;
    if (::write(socket_.get(), &bell, 1) != 1 || ::read(socket_.get(), &bell, 1) != 1)
      throw std::runtime_error("the server of processes is gone");
    return *board_;
  }

 private:
  [[noreturn]] static void serve(Board& board, int socket) {
    char bell = 0;
    while (::read(socket, &bell, 1) == 1) {
      run_job(board);
      if (::write(socket, &bell, 1) != 1) break;
    }
    std::_Exit(0);
  }

  Board* board_ = nullptr;
  UniqueFd socket_;
};

Server* const server = dynamic_cast<Server*>(::testing::AddGlobalTestEnvironment(new Server));

}  // namespace

Outcome run_in_processes(const Program& program, bool compares, std::chrono::milliseconds timeout) {
  const Board& board = server->run(program, compares, timeout);
  Outcome outcome;
  for (int rank = 0; rank < program.ranks; ++rank) {
    outcome.errors[static_cast<size_t>(rank)] = board.errors[rank];
    outcome.differences[static_cast<size_t>(rank)] = board.differences[rank];
  }
  return outcome;
}

}  // namespace lockstep::fuzz
