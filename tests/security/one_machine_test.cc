// SPDX-License-Identifier: Apache-2.0
// A job on one machine has no TCP socket at which anybody could reach it, neither while its ranks meet nor afterwards.
#include <algorithm>
#include <fstream>

#include "lockstep/base/sockets/endpoint.h"
#include "tests/launch/child.h"
#include "tests/security/listeners.h"
#include "tests/train/command.h"

namespace lockstep::testing {
namespace {

const Words kLongTraining = {LOCKSTEP_COMMAND, "train",  "--data", "synthetic:256x1x28x28",
                             "--epochs",       "100000", "--quiet"};

bool has_meeting(const Child& job) {
  return std::ranges::any_of(unix_listeners_of(job.pid()),
                             [](const std::string& name) { return name.starts_with("@lockstep-meeting-"); });
}

TEST(OneMachine, a_listener_would_be_found) {
  const UniqueFd fd = listen_at(look_up({"127.0.0.1", 0}, Deadline::after(kPatience)).addresses);
  EXPECT_EQ(tcp_listeners_of(::getpid()).size(), 1U);
}

// Rank 0 waits at the meeting until rank 1 is told to start.
TEST(OneMachine, nobody_reaches_the_ranks_of_lockstep_run_by_tcp) {
  const TempFolder folder;
  const Words wait_for_word = {"sh", "-c", "[ $RANK = 0 ] || until [ -e \"$0\" ]; do sleep 0.02; done; exec \"$@\"",
                               folder.file("go")};
  const Child job(Words{LOCKSTEP_COMMAND, "run", "--nproc-per-node", "2", "--"} + wait_for_word + kLongTraining +
                  Words{"--metrics", folder.file("metrics")});
  ASSERT_TRUE(wait_until([&] { return has_meeting(job); })) << job.error();
  EXPECT_EQ(tcp_listeners_of(job.pid()), std::set<std::string>()) << "while the ranks meet";
  std::ofstream(folder.file("go")).close();
  ASSERT_TRUE(wait_until([&] { return steps_in(folder.file("metrics")) >= 2; })) << job.error();
  EXPECT_EQ(tcp_listeners_of(job.pid()), std::set<std::string>()) << "while they train";
  EXPECT_FALSE(has_meeting(job)) << "nobody else comes";
}

TEST(OneMachine, nobody_reaches_the_ranks_of_lockstep_train_by_tcp) {
  const TempFolder folder;
  const Child job(kLongTraining + Words{"--ranks", "2", "--metrics", folder.file("metrics")});
  ASSERT_TRUE(wait_until([&] { return steps_in(folder.file("metrics")) >= 2; })) << job.error();
  EXPECT_EQ(tcp_listeners_of(job.pid()), std::set<std::string>());
}

}  // namespace
}  // namespace lockstep::testing
