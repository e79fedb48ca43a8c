// SPDX-License-Identifier: Apache-2.0
#include "lockstep/train/end_as_asked.h"

#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdlib>
#include <string>

#include "lockstep/base/log.h"
#include "lockstep/error.h"

namespace lockstep {
namespace {

// scontrol has deadlines of its own (Slurm's MessageTimeout).
bool run_scontrol() {
  std::string job = std::getenv("SLURM_JOB_ID");
  std::string command = "scontrol", action = "requeue";
  const std::array<char*, 4> arguments = {command.data(), action.data(), job.data(), nullptr};
  pid_t pid = 0;
  if (::posix_spawnp(&pid, "scontrol", nullptr, nullptr, arguments.data(), ::environ) != 0) return false;
  int status = 0;
  while (::waitpid(pid, &status, 0) < 0)
    if (errno != EINTR) return false;
  return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

void requeue(const World& world) {
  const torch::Tensor done = torch::ones({1});
  if (world.rank() == 0 && !run_scontrol()) done.zero_();
  world.broadcast(done);
  if (done.item<float>() == 0)
    throw SystemError({.what = "scontrol requeue failed",
                       .here = world.describe(),
                       .likely = "a job that was submitted with --no-requeue, or no scontrol on this node",
                       .next = "the checkpoint is written: submit the job again, with --resume"});
}

// Without a deadline: this is what was asked for. A second Ctrl-C ends it, too.
[[noreturn]] void wait_until_killed() {
  for (;;) ::pause();
}

}  // namespace

int end_as_asked(const World& world, const PreemptionOptions& options) {
  const auto [signals, then, code] = stop_plan(options);
  if (then == AfterStop::kExit) return code;
  if (then == AfterStop::kRequeue) {
    requeue(world);
    ::signal(SIGTERM, SIG_DFL);  // Slurm's, which ends the job now that it is queued again
  }
  if (world.rank() == 0) log_info("waiting until the scheduler ends this job");
  wait_until_killed();
}

}  // namespace lockstep
