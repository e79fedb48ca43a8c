// SPDX-License-Identifier: Apache-2.0
// Two looks at a job, made up, and what is said about them.
#include <gtest/gtest.h>

#include "cli/top/view.h"
#include "tests/support.h"

namespace lockstep::top {
namespace {

using lockstep::testing::contains;

constexpr std::int64_t kMs = 1'000'000;
constexpr std::int64_t kSecond = 1000 * kMs;

// Two looks, a second apart, at ranks that have done nothing in between.
struct TwoLooks {
  JobLook before, now;

  explicit TwoLooks(int ranks) {
    before.job.world_size = now.job.world_size = ranks;
    for (int rank = 0; rank < ranks; ++rank) {
      RankLook look{.at = 100 * kSecond,
                    .pid = 1000 + rank,
                    .rank = rank,
                    .phase = Phase::kForward,
                    .phase_since = 100 * kSecond,
                    .step = 10,
                    .state = 'R'};
      before.ranks.push_back(look);
      look.at += kSecond;
      now.ranks.push_back(look);
    }
  }

  // Rank `rank` was in this phase for so many ms, and goes on.
  TwoLooks& spends(int rank, Phase phase, std::int64_t ms) {
    RankLook& look = now.ranks.at(static_cast<std::size_t>(rank));
    look.in_phase[static_cast<std::size_t>(phase)] += ms * kMs;
    ++look.moves;
    return *this;
  }

  TwoLooks& waits(int rank, Phase phase, int peer, std::int64_t ms) {
    spends(rank, phase, ms);
    RankLook& look = now.ranks.at(static_cast<std::size_t>(rank));
    look.waited[static_cast<std::size_t>(phase)] += ms * kMs;
    look.waited_for[1000 + peer] += ms * kMs;
    return *this;
  }

  // It has been waiting for long.
  void is_waiting(int rank, int peer) {
    for (JobLook* look : {&before, &now}) {
      RankLook& each = look->ranks.at(static_cast<std::size_t>(rank));
      each.phase = Phase::kExchange;
      each.wait_since = each.phase_since = 80 * kSecond;
      each.waits_for = 1000 + peer;
    }
  }

  JobView view() const { return view_of(before, now); }
  Verdict first() const { return view().verdicts.at(0); }
};

TEST(View, divides_the_time_between_the_looks) {
  TwoLooks looks(1);
  looks.spends(0, Phase::kForward, 200).spends(0, Phase::kBackward, 300).spends(0, Phase::kLoading, 100);
  looks.waits(0, Phase::kUpdate, 7, 100).spends(0, Phase::kUpdate, 100).spends(0, Phase::kExchange, 200);
  looks.now.ranks[0].step = 15;
  looks.now.ranks[0].samples = 640;
  const RankView rank = looks.view().ranks[0];
  EXPECT_NEAR(rank.shares.compute, 0.5, 1e-9);
  EXPECT_NEAR(rank.shares.data, 0.1, 1e-9);
  EXPECT_NEAR(rank.shares.wait, 0.1, 1e-9);
  EXPECT_NEAR(rank.shares.update, 0.1, 1e-9);
  EXPECT_NEAR(rank.shares.exchange, 0.2, 1e-9);
  EXPECT_NEAR(rank.steps_per_second, 5, 1e-9);
  EXPECT_NEAR(rank.samples_per_second, 640, 1e-9);
}

TEST(View, has_no_rates_at_the_first_look_nor_of_a_process_that_is_new) {
  TwoLooks looks(2);
  looks.spends(1, Phase::kForward, 500);
  looks.now.ranks[0].samples = looks.now.ranks[1].samples = 100;
  looks.before.ranks[0].pid = 4711;
  const JobView view = looks.view();
  EXPECT_EQ(view.ranks[0].samples_per_second, 0);
  EXPECT_EQ(view.ranks[1].samples_per_second, 100);
  EXPECT_EQ(view_of({}, looks.now).samples_per_second, 0);
}

TEST(View, of_a_rank_that_stands_still_says_since_when) {
  TwoLooks looks(2);
  looks.before.ranks[0].phase_since = looks.now.ranks[0].phase_since = 61 * kSecond;
  looks.spends(1, Phase::kForward, 900);
  const JobView view = looks.view();
  EXPECT_NEAR(view.ranks[0].seconds_since_progress, 40, 1e-6);
  EXPECT_LE(view.ranks[1].seconds_since_progress, 1);
}

TEST(View, of_a_server_counts_its_requests_and_delays) {
  TwoLooks looks(2);
  looks.before.ranks[0].server = {
      .clients = 1, .requests = 10, .ns_in_hand = 0, .gradients = 10, .delays = 5, .most_delay = 4};
  looks.now.ranks[0].server = {
      .clients = 1, .requests = 30, .ns_in_hand = 500 * kMs, .gradients = 20, .delays = 25, .most_delay = 4};
  const ServerView server = looks.view().ranks[0].server.value();
  EXPECT_NEAR(server.queue, 0.5, 1e-9);
  EXPECT_NEAR(server.requests, 20, 1e-9);
  EXPECT_NEAR(server.ms, 25, 1e-9);
  EXPECT_NEAR(server.mean_delay, 2, 1e-9);
  EXPECT_EQ(server.most_delay, 4);
}

TEST(Verdict, names_the_rank_that_waits_for_data_and_how_many_workers_it_needs) {
  TwoLooks looks(3);
  for (const int rank : {0, 1}) looks.spends(rank, Phase::kForward, 1000);
  looks.spends(2, Phase::kLoading, 380).spends(2, Phase::kForward, 620);
  looks.now.ranks[2].loader_workers = 1;
  const Verdict verdict = looks.first();
  EXPECT_EQ(verdict.kind, "data");
  EXPECT_EQ(verdict.ranks, std::vector{2});
  EXPECT_EQ(verdict.text, "rank 2 waits for data: 38 % of its time; --workers 2");
}

TEST(Verdict, of_ranks_that_all_wait_for_data_is_one) {
  TwoLooks looks(3);
  for (const int rank : {0, 1, 2}) looks.spends(rank, Phase::kLoading, 750).spends(rank, Phase::kForward, 250);
  for (RankLook& rank : looks.now.ranks) rank.loader_workers = 2;
  EXPECT_EQ(looks.view().verdicts.size(), 1);
  EXPECT_EQ(looks.first().text, "ranks 0, 1 and 2 wait for data: up to 75 % of their time; --workers 8");
}

TEST(Verdict, says_that_a_rank_without_data_holds_up_the_others) {
  TwoLooks looks(2);
  looks.spends(0, Phase::kForward, 600).waits(0, Phase::kExchange, 1, 400);
  looks.spends(1, Phase::kForward, 600).spends(1, Phase::kLoading, 400);
  EXPECT_EQ(looks.view().verdicts.size(), 1);
  EXPECT_EQ(looks.first().text,
            "rank 1 waits for data: 40 % of its time, and the others wait for it 40 % of theirs; --workers 1");
}

TEST(Verdict, blames_no_data_for_waits_of_both_sides) {
  TwoLooks looks(2);
  looks.spends(0, Phase::kForward, 310).waits(0, Phase::kExchange, 1, 600).spends(0, Phase::kLoading, 90);
  looks.spends(1, Phase::kForward, 260).waits(1, Phase::kExchange, 0, 620).spends(1, Phase::kLoading, 120);
  EXPECT_EQ(looks.first().text, "rank 1 waits for data: 12 % of its time; --workers 1");
}

TEST(Verdict, names_the_straggler_by_whom_the_others_wait_for) {
  TwoLooks looks(4);
  for (const int rank : {0, 2, 3}) looks.spends(rank, Phase::kForward, 600).waits(rank, Phase::kExchange, 1, 400);
  looks.spends(1, Phase::kForward, 1000);
  const Verdict verdict = looks.first();
  EXPECT_EQ(verdict.kind, "straggler");
  EXPECT_EQ(verdict.ranks, std::vector{1});
  EXPECT_TRUE(
      contains(verdict.text, "rank 1 is the straggler: the others wait for it 40 % of their time; it computes 100 %"));
}

TEST(Verdict, says_of_a_straggler_without_a_core_that_it_has_none) {
  TwoLooks looks(2);
  looks.spends(0, Phase::kForward, 500).waits(0, Phase::kUpdate, 1, 500).spends(1, Phase::kForward, 1000);
  looks.now.ranks[1].ns_without_core = 450 * kMs;
  EXPECT_TRUE(contains(looks.first().text, "it gets no core 45 % of its time"));
}

TEST(Verdict, takes_nobody_for_a_straggler_where_all_wait_alike) {
  TwoLooks looks(2);
  for (const int rank : {0, 1}) looks.spends(rank, Phase::kForward, 800).waits(rank, Phase::kExchange, 1 - rank, 200);
  EXPECT_EQ(looks.first().text,
            "no rank holds up the others; 80 % of the time is computing, 20 % waiting for one another in turn");
}

// It waits for its core, and sometimes for the others.
TEST(Verdict, names_a_straggler_that_waits_itself_but_much_less) {
  TwoLooks looks(2);
  looks.spends(0, Phase::kForward, 320).waits(0, Phase::kExchange, 1, 680);
  looks.spends(1, Phase::kForward, 620).waits(1, Phase::kExchange, 0, 380);
  EXPECT_EQ(looks.first().kind, "straggler");
  EXPECT_EQ(looks.first().ranks, std::vector{1});
}

TEST(Verdict, names_ranks_that_get_no_core) {
  TwoLooks looks(2);
  for (const int rank : {0, 1}) looks.spends(rank, Phase::kForward, 900).waits(rank, Phase::kExchange, 1 - rank, 100);
  looks.now.ranks[0].ns_without_core = 500 * kMs;
  looks.now.ranks[1].ns_without_core = 600 * kMs;
  EXPECT_EQ(looks.first().kind, "cores");
  EXPECT_EQ(
      looks.first().text,
      "ranks 0 and 1 get no core up to 60 % of their time: fewer ranks or --threads, or see what else runs on these "
      "cores");
  for (RankLook& rank : looks.now.ranks) rank.ns_without_core = 150 * kMs;
  EXPECT_EQ(looks.first().kind, "fine");
}

TEST(Verdict, names_a_rank_that_is_stopped) {
  TwoLooks looks(2);
  looks.is_waiting(0, 1);
  looks.now.ranks[1].state = 'T';
  EXPECT_EQ(looks.first().kind, "stopped");
  EXPECT_EQ(looks.first().text, "rank 1 is stopped by a signal; kill -CONT 1001");
}

TEST(Verdict, names_a_rank_that_has_died) {
  TwoLooks looks(2);
  looks.now.ranks[1].state = 0;
  EXPECT_EQ(looks.first().text, "rank 1 has died, in forward of step 10");
  looks.now.ranks[1].phase = Phase::kEnded;
  EXPECT_EQ(looks.first().kind, "fine");
}

TEST(Verdict, finds_ranks_that_wait_for_one_another) {
  TwoLooks looks(3);
  for (const int rank : {0, 1, 2}) looks.is_waiting(rank, (rank + 1) % 3);
  EXPECT_EQ(looks.first().kind, "circle");
  EXPECT_TRUE(contains(looks.first().text, "all ranks wait for one another, rank 0 for rank 1"));
}

TEST(Verdict, says_where_a_rank_stands_for_which_others_wait) {
  TwoLooks looks(2);
  looks.is_waiting(0, 1);
  looks.before.ranks[1].phase_since = looks.now.ranks[1].phase_since = 61 * kSecond;
  EXPECT_EQ(looks.first().kind, "stuck");
  EXPECT_EQ(
      looks.first().text,
      "rank 1 has not moved for 40.0 s, in forward of step 10, and others wait for it; gdb -p 1001 shows where it is");
}

TEST(Verdict, names_who_has_not_come_to_the_meeting) {
  TwoLooks looks(3);
  looks.now.ranks[0].phase = looks.now.ranks[1].phase = Phase::kMeeting;
  looks.now.ranks[2].pid = 0;
  EXPECT_EQ(looks.first().text, "rank 2 has not come to the meeting yet; the others wait there");
  for (RankLook& rank : looks.now.ranks) rank.pid = 0;
  EXPECT_EQ(looks.first().kind, "starting");
}

TEST(Verdict, tells_a_busy_server_from_a_slow_worker) {
  TwoLooks looks(4);
  looks.now.ranks[0].server.clients = 3;
  for (const int rank : {1, 2, 3}) looks.spends(rank, Phase::kForward, 500).waits(rank, Phase::kExchange, 0, 500);
  EXPECT_EQ(looks.first().kind, "server");
  EXPECT_EQ(looks.first().text, "rank 0 is a server for which the workers wait 50 % of their time; --servers 2");

  TwoLooks slow(4);
  slow.now.ranks[0].server.clients = 3;
  for (const int rank : {1, 3}) slow.spends(rank, Phase::kForward, 400).waits(rank, Phase::kExchange, 0, 600);
  slow.spends(2, Phase::kForward, 1000);
  EXPECT_EQ(slow.first().kind, "straggler");
  EXPECT_EQ(slow.first().ranks, std::vector{2});
}

TEST(Verdict, takes_nobody_for_a_straggler_where_servers_update_asynchronously) {
  TwoLooks looks(3);
  looks.now.ranks[0].server = {.clients = 2, .most_delay = 3};
  looks.spends(1, Phase::kForward, 950).waits(1, Phase::kExchange, 0, 50);
  looks.spends(2, Phase::kForward, 300).waits(2, Phase::kExchange, 0, 700);
  looks.now.ranks[1].step += 5;
  looks.now.ranks[2].step += 15;
  EXPECT_EQ(looks.first().kind, "server");
  looks.now.ranks[1].step += 10;  // but where all make as many steps
  EXPECT_EQ(looks.first().kind, "straggler");
  EXPECT_EQ(looks.first().ranks, std::vector{1});
}

TEST(Verdict, finds_the_worker_that_waits_less_for_servers_than_the_others_do) {
  TwoLooks looks(4);
  looks.now.ranks[0].server.clients = 3;
  for (const int rank : {1, 3}) looks.spends(rank, Phase::kForward, 550).waits(rank, Phase::kExchange, 0, 450);
  looks.spends(2, Phase::kForward, 900).waits(2, Phase::kExchange, 0, 100);
  EXPECT_EQ(looks.first().kind, "straggler");
  EXPECT_EQ(looks.first().ranks, std::vector{2});
}

// The others wait for rank 0's whole second, which is longer than any step.
TEST(Verdict, says_of_a_rank_that_validates_or_saves_for_long_what_it_does) {
  TwoLooks looks(2);
  looks.waits(1, Phase::kExchange, 0, 1000).is_waiting(1, 0);
  looks.spends(0, Phase::kValidating, 1000);
  for (JobLook* look : {&looks.before, &looks.now}) {
    RankLook& saving = look->ranks[0];
    saving.phase = Phase::kValidating;
    saving.phase_since = 90 * kSecond;
    saving.moves = 7;
  }
  EXPECT_EQ(looks.first().kind, "straggler");
  EXPECT_TRUE(contains(looks.first().text, "it validates or saves 100 % of its time, the others 0 %"))
      << looks.first().text;
  for (JobLook* look : {&looks.before, &looks.now}) look->ranks[0].phase_since = 30 * kSecond;
  EXPECT_EQ(looks.first().kind, "stuck");
}

TEST(Verdict, says_where_a_programs_own_code_takes_the_time) {
  TwoLooks looks(2);
  for (const int rank : {0, 1}) looks.spends(rank, Phase::kForward, 300).spends(rank, Phase::kOwnCode, 700);
  EXPECT_EQ(looks.first().kind, "fine");
  EXPECT_TRUE(contains(looks.first().text, "70 % in the program's own code")) << looks.first().text;

  TwoLooks slow(2);
  slow.spends(0, Phase::kForward, 400).waits(0, Phase::kExchange, 1, 600);
  slow.spends(1, Phase::kForward, 400).spends(1, Phase::kOwnCode, 600);
  EXPECT_TRUE(contains(slow.first().text, "it runs the program's own code 60 % of its time, the others 0 %"))
      << slow.first().text;
}

TEST(Verdict, is_content_where_nobody_waits) {
  TwoLooks looks(2);
  for (const int rank : {0, 1}) looks.spends(rank, Phase::kForward, 930).spends(rank, Phase::kUpdate, 70);
  EXPECT_EQ(looks.first().text, "no rank holds up the others; 93 % of the time is computing");
}

}  // namespace
}  // namespace lockstep::top
