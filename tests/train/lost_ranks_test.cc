// SPDX-License-Identifier: Apache-2.0
// Every strategy with a rank or device that is killed, stopped, throws, hangs or is slow. docs/strategies/ says what the
// other ranks do then.
#include <signal.h>

#include "lockstep/deadline.h"
#include "tests/shm/support.h"
#include "tests/train/ranks.h"

namespace lockstep {
namespace {

using testing::contains;
using testing::Ended;
using testing::kAtOnce;
using testing::Ranks;
using testing::run;
using testing::with_variables;
using testing::operator+;
using testing::Words;

constexpr double kTimeout = 1.0 * LOCKSTEP_TEST_PATIENCE;  // --timeout, in seconds

constexpr std::chrono::seconds kPatience{static_cast<int>(4 * kTimeout + 20)};

// A strategy, and which of its ranks is lost.
struct Arrangement {
  std::string name;
  int ranks;
  int victim;
  Words options;
};

void PrintTo(const Arrangement& arrangement, std::ostream* out) { *out << arrangement.name; }

const std::vector<Arrangement> kArrangements = {
    {"ddp", 3, 1, {"--strategy", "ddp"}},
    {"ddp_of_separate_parameters", 3, 0, {"--strategy", "ddp", "--separate-parameters"}},
    {"averaging", 3, 1, {"--strategy", "averaging", "--devices-per-worker", "2", "--average-every", "3"}},
    {"diloco",
     2,
     0,
     {"--strategy", "averaging", "--devices-per-worker", "1", "--average-every", "500", "--outer-lr", "0.7",
      "--outer-momentum", "0.9"}},
    {"pipeline", 3, 1, {"--strategy", "pipeline", "--devices-per-worker", "1", "--stages", "0-0,1-1,2-2"}},
    {"pipeline_of_replicas", 4, 3, {"--strategy", "pipeline", "--devices-per-worker", "1", "--stages", "0-0,1-2"}},
    {"kvstore_dist_sync", 3, 2, {"--strategy", "kvstore", "--kvstore", "dist_sync", "--servers", "1"}},
};

const Words kProgram = {MISBEHAVING_TASK, "--threads", "1", "--seed", "3", "--batch-size", "24"};

// All but the victim end with an error that names it.
void expect_that_others_name(int victim, Ranks& ranks) {
  for (int rank = 0; rank < ranks.count(); ++rank) {
    if (rank == victim) continue;
    EXPECT_EQ(ranks[rank].wait(kPatience), 1) << "rank " << rank;
    EXPECT_TRUE(contains(ranks[rank].error(), "PeerLost: "));
    EXPECT_TRUE(contains(ranks[rank].error(), "rank " + std::to_string(victim))) << "rank " << rank;
  }
}

class LostRank : public ::testing::TestWithParam<Arrangement> {
 protected:
  Words program(const Words& more) const { return kProgram + GetParam().options + more; }
  int victim() const { return GetParam().victim; }
};
INSTANTIATE_TEST_SUITE_P(Strategies, LostRank, ::testing::ValuesIn(kArrangements),
                         [](const auto& test) { return test.param.name; });

TEST_P(LostRank, killed_is_named_by_the_others_at_once) {
  Ranks ranks(GetParam().ranks, program({"--epochs", "1000"}));
  ASSERT_TRUE(ranks.have_made(10)) << ranks[0].error();
  ranks[victim()].signal(SIGKILL);
  const Stopwatch watch;
  expect_that_others_name(victim(), ranks);
  EXPECT_LT(watch.seconds(), kAtOnce);
}

TEST_P(LostRank, stopped_is_named_by_the_others_after_the_timeout) {
  Ranks ranks(GetParam().ranks, program({"--epochs", "1000", "--timeout", std::to_string(kTimeout)}));
  ASSERT_TRUE(ranks.have_made(10)) << ranks[0].error();
  ranks[victim()].signal(SIGSTOP);
  const Stopwatch watch;
  expect_that_others_name(victim(), ranks);
  EXPECT_GT(watch.seconds(), 0.9 * kTimeout);
  EXPECT_LT(watch.seconds(), kTimeout + kAtOnce);
}

TEST_P(LostRank, throwing_is_named_by_the_others_at_once) {
  Ranks ranks(GetParam().ranks, program({"--epochs", "1000"}), {{"MISBEHAVE", "throw"}});
  EXPECT_EQ(ranks[1].wait(), 1);
  const Stopwatch watch;
  for (int rank = 0; rank < ranks.count(); ++rank) {
    EXPECT_EQ(ranks[rank].wait(), 1) << "rank " << rank;
    EXPECT_TRUE(contains(ranks[rank].error(), rank == 1 ? "DataError: " : "PeerLost: "));
    EXPECT_TRUE(contains(ranks[rank].error(), rank == 1 ? "thrown on purpose" : "rank 1"));
  }
  EXPECT_LT(watch.seconds(), kAtOnce);
}

TEST_P(LostRank, slow_is_waited_for_and_changes_nothing) {
  const Words steps = {"--max-steps", "150", "--timeout", "20"};
  Ranks quick(GetParam().ranks, program(steps));
  for (int rank = 0; rank < quick.count(); ++rank) EXPECT_EQ(quick[rank].wait(), 0) << quick[rank].error();
  Ranks ranks(GetParam().ranks, program(steps));
  ASSERT_TRUE(ranks.have_made(5)) << ranks[0].error();
  ranks[victim()].signal(SIGSTOP);
  EXPECT_FALSE(testing::wait_until([&] { return ranks.losses().size() >= 150; }, std::chrono::milliseconds(200)));
  ranks[victim()].signal(SIGCONT);
  for (int rank = 0; rank < ranks.count(); ++rank) EXPECT_EQ(ranks[rank].wait(), 0) << ranks[rank].error();
  EXPECT_EQ(ranks.losses(), quick.losses());
}

// ---- Servers: no worker can go on without them.

class ServerOfTwo : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Servers, ServerOfTwo, ::testing::Values(0, 1));

TEST_P(ServerOfTwo, killed_ends_all_ranks_at_once) {
  Ranks ranks(4, kProgram + Words{"--strategy", "kvstore", "--kvstore", "dist_async", "--servers", "2", "--split-above",
                                  "5000", "--epochs", "1000"});
  ASSERT_TRUE(ranks.have_made(10)) << ranks[0].error();
  ranks[GetParam()].signal(SIGKILL);
  const Stopwatch watch;
  expect_that_others_name(GetParam(), ranks);
  EXPECT_LT(watch.seconds(), kAtOnce);
}

TEST(Server, stopped_ends_all_ranks_after_three_timeouts) {
  Ranks ranks(3, kProgram + Words{"--strategy", "kvstore", "--kvstore", "dist_async", "--servers", "1", "--epochs",
                                  "1000", "--timeout", std::to_string(kTimeout)});
  ASSERT_TRUE(ranks.have_made(10)) << ranks[0].error();
  ranks[0].signal(SIGSTOP);
  const Stopwatch watch;
  expect_that_others_name(0, ranks);
  EXPECT_LT(watch.seconds(), 3 * kTimeout + kAtOnce);
}

// ---- Devices that are threads: a busy thread can't be ended, but its program can.

class HangingDevice : public ::testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(Strategies, HangingDevice,
                         ::testing::Values("towers", "data_parallel", "kvstore", "averaging", "pipeline"),
                         [](const auto& test) { return std::string(test.param); });

TEST_P(HangingDevice, ends_its_program_after_the_timeout) {
  const Stopwatch watch;
  const Ended ended =
      run(with_variables({{"MISBEHAVE", "hang"}, {"ASAN_OPTIONS", "detect_leaks=0"}},
                         {MISBEHAVING_TASK, "--threads", "1", "--batch-size", "24", "--strategy", GetParam(), "--ranks",
                          "2", "--epochs", "1000", "--quiet", "--timeout", std::to_string(kTimeout)}));
  EXPECT_EQ(ended.exit_code, 1);
  EXPECT_TRUE(contains(ended.error, "PeerLost: device cpu:"));
  EXPECT_TRUE(contains(ended.error, "is not done within"));
  EXPECT_LT(watch.seconds(), kTimeout + kAtOnce);
}

}  // namespace
}  // namespace lockstep
