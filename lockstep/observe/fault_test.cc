// SPDX-License-Identifier: Apache-2.0
#include "lockstep/observe/fault.h"

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>

#include "lockstep/error.h"
#include "lockstep/observe/phase_scope.h"
#include "tests/support.h"

namespace lockstep {
namespace {

using testing::contains;

// The signal that ends a child which makes steps 0 to 9, each with two phases, of which the second waits at first; 0: it comes to its end. `reached` says how
// far it has come.
int signal_of(const char* faults, const char* rank, std::string& reached) {
  int ends[2];
  if (::pipe(ends) != 0) return -1;
  const pid_t child = ::fork();
  if (child == 0) {
    ::close(ends[0]);
    ::setenv("LOCKSTEP_FAULT", faults, 1);
    ::setenv("RANK", rank, 1);
    fault::read_plan();
    for (int step = 0; step < 10; ++step) {
      observe::begin_step(step);
      {
        const PhaseScope forward(Phase::kForward);
        for (int i = 0; i < 3; ++i)
          if (::write(ends[1], "f", 1) != 1) ::_exit(1);
      }
      const PhaseScope update(Phase::kUpdate);
      if (::write(ends[1], "b", 1) != 1) ::_exit(1);  // waits at a barrier
      const FaultScope writing(Phase::kUpdate);
      if (::write(ends[1], "u", 1) != 1) ::_exit(1);
    }
    ::_exit(0);
  }
  ::close(ends[1]);
  reached.clear();
  char byte = 0;
  while (::read(ends[0], &byte, 1) == 1) reached += byte;
  ::close(ends[0]);
  int status = 0;
  ::waitpid(child, &status, 0);
  return WIFSIGNALED(status) ? WTERMSIG(status) : WEXITSTATUS(status);
}

TEST(Fault, kills_the_rank_in_its_phase_of_its_step) {
  std::string reached;
  EXPECT_EQ(signal_of("rank=1,step=1,phase=update", "1", reached), SIGKILL);
  EXPECT_EQ(reached, "fffbufffb");
  EXPECT_EQ(signal_of("rank=1,step=0,phase=forward,at=end,signal=15", "1", reached), SIGTERM);
  EXPECT_EQ(reached, "fff");
}

TEST(Fault, leaves_other_ranks_and_generations_alone) {
  std::string reached;
  EXPECT_EQ(signal_of("rank=1,step=1,phase=update", "0", reached), 0);
  EXPECT_EQ(signal_of("rank=1,step=1,phase=update,generation=1", "1", reached), 0);
  EXPECT_EQ(reached.size(), 50);
}

TEST(Fault, comes_after_a_number_of_instructions_and_not_after_its_phase) {
  std::string reached, further;
  EXPECT_EQ(signal_of("step=2,phase=forward,after=1", "0", reached), SIGKILL);
  EXPECT_EQ(reached, "fffbufffbu");
  EXPECT_EQ(signal_of("step=2,phase=forward,after=1000000", "0", further), SIGKILL);
  EXPECT_EQ(further, "fffbufffbufff");
}

TEST(Fault, that_cannot_be_read_is_an_error_that_says_where) {
  const auto message_for = [](const char* faults) {
    ::setenv("LOCKSTEP_FAULT", faults, 1);
    const std::string message = testing::message_of<UsageError>([] { fault::read_plan(); });
    ::unsetenv("LOCKSTEP_FAULT");
    return message;
  };
  EXPECT_TRUE(contains(message_for("rank=1,phase=lunch"), "phase lunch: there is no such value"));
  EXPECT_TRUE(contains(message_for("rank=one,phase=update"), "\"rank=one\" has no meaning"));
  EXPECT_TRUE(contains(message_for("phase=update,colour=red"), "\"colour=red\" has no meaning"));
  EXPECT_TRUE(contains(message_for("rank=1"), "no phase in LOCKSTEP_FAULT=\"rank=1\""));
  EXPECT_TRUE(contains(message_for("phase=update,signal=900"), "no signal 900"));
}

}  // namespace
}  // namespace lockstep
