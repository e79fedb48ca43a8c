// SPDX-License-Identifier: Apache-2.0
#include "lockstep/launch/machines.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <functional>
#include <future>
#include <thread>

#include "lockstep/base/text.h"
#include "lockstep/deadline.h"
#include "lockstep/error.h"
#include "lockstep/launch/node_meeting.h"
#include "tests/support.h"

namespace lockstep {
namespace {

using std::chrono::milliseconds;

struct JobOfMachines : ::testing::Test {
  JobOfMachines() { ::setenv("LOCKSTEP_SECRET", std::string(64, 'c').c_str(), 1); }
  ~JobOfMachines() override { ::unsetenv("LOCKSTEP_SECRET"); }

  NodeMeeting meeting(int least, int most) const {
    return {.place = {"127.0.0.1", port.number()},
            .job = "a job that stays",
            .least = least,
            .most = most,
            .timeout = milliseconds(20'000),
            .last_call = milliseconds(200),
            .stays = true};
  }

  ReservedPort port;
};

Membership::Options options_of(const NodeMeeting& meeting) { return {.least = meeting.least, .most = meeting.most}; }

using Launcher = std::unique_ptr<Machines>;

Launcher meet_and_stay(const NodeMeeting& meeting) {
  return std::make_unique<Machines>(options_of(meeting), meet_nodes(meeting));
}

std::vector<Launcher> begin_job(const NodeMeeting& meeting, int machines) {
  std::vector<std::future<Launcher>> beginning;
  for (int i = 0; i < machines; ++i) beginning.push_back(std::async(std::launch::async, meet_and_stay, meeting));
  std::vector<Launcher> launchers;
  for (auto& each : beginning) launchers.push_back(each.get());
  std::ranges::sort(launchers, {}, [](const Launcher& each) { return each->node_rank(); });
  return launchers;
}

// Lets all of them work until it holds.
bool comes(std::vector<Launcher>& launchers, const std::function<bool()>& condition,
           milliseconds within = milliseconds(20'000)) {
  const Deadline deadline = Deadline::after(within);
  while (!condition() && !deadline.passed()) {
    std::vector<Event> events;
    for (const Launcher& each : launchers) std::ranges::copy(each->events(), std::back_inserter(events));
    poll_events(events, 10);
    for (const Launcher& each : launchers) each->work();
  }
  return condition();
}

bool all_at(const std::vector<Launcher>& launchers, int epoch) {
  return std::ranges::all_of(launchers, [&](const Launcher& each) { return each->epoch().number == epoch; });
}

TEST_F(JobOfMachines, stays_connected_and_leaves_out_who_closes_the_connection) {
  auto launchers = begin_job(meeting(1, 3), 3);
  for (int i = 0; i < 3; ++i) EXPECT_EQ(launchers[static_cast<unsigned>(i)]->node_rank(), i);
  // Connected: whoever is asked for a new epoch gets it from the others.
  launchers[2]->want_restart();
  ASSERT_TRUE(comes(launchers, [&] { return all_at(launchers, 1); }));
  launchers.erase(launchers.begin());  // machine 0
  ASSERT_TRUE(comes(
      launchers, [&] { return all_at(launchers, 2); }, milliseconds(2000)));
  EXPECT_EQ(launchers[0]->node_rank(), 0);
  EXPECT_EQ(launchers[1]->epoch().world_size(), 2);
  EXPECT_EQ(launchers[0]->take_news()->number, 2);
  EXPECT_FALSE(launchers[0]->take_news());
  EXPECT_FALSE(launchers[0]->end());
}

TEST_F(JobOfMachines, lets_a_new_machine_in_while_it_runs) {
  auto launchers = begin_job(meeting(2, 3), 2);
  auto joining = std::async(std::launch::async, meet_and_stay, meeting(2, 3));
  ASSERT_TRUE(comes(launchers, [&] { return all_at(launchers, 1); }));
  launchers.push_back(joining.get());
  EXPECT_EQ(launchers[2]->node_rank(), 2);
  launchers[2]->want_restart();  // it has a connection to the others
  ASSERT_TRUE(comes(launchers, [&] { return all_at(launchers, 2); }));
  EXPECT_EQ(launchers[0]->epoch().members.size(), 3U);
}

// Machine 0 comes back, listens where the job has begun, and is told by its successor that the job runs.
TEST_F(JobOfMachines, machine_0_comes_back_in) {
  auto launchers = begin_job(meeting(1, 3), 3);
  ASSERT_TRUE(comes(launchers, [&] { return launchers[2]->events().size() >= 3; }));
  launchers[0]->want_restart();
  ASSERT_TRUE(comes(launchers, [&] { return all_at(launchers, 1); }));
  launchers.erase(launchers.begin());
  ASSERT_TRUE(comes(launchers, [&] { return all_at(launchers, 2); }));
  NodeMeeting again = meeting(1, 3);
  again.last_call = milliseconds(20'000);
  auto joining = std::async(std::launch::async, meet_and_stay, again);
  ASSERT_TRUE(comes(launchers, [&] { return all_at(launchers, 3); }));
  launchers.push_back(joining.get());
  EXPECT_EQ(launchers[2]->node_rank(), 2);
  EXPECT_EQ(launchers[2]->job(), launchers[0]->job());
}

TEST_F(JobOfMachines, ends_everywhere_when_one_ends_it) {
  auto launchers = begin_job(meeting(2, 2), 2);
  launchers[0]->want_restart();
  ASSERT_TRUE(comes(launchers, [&] { return all_at(launchers, 1); }));
  launchers[1]->end_job("no restarts are left");
  ASSERT_TRUE(comes(launchers, [&] { return launchers[0]->end().has_value(); }));
  EXPECT_EQ(*launchers[0]->end(), "no restarts are left");
}

TEST_F(JobOfMachines, all_have_finished_when_each_has) {
  auto launchers = begin_job(meeting(2, 3), 3);
  for (const Launcher& each : launchers) each->finish();
  ASSERT_TRUE(comes(launchers, [&] {
    return std::ranges::all_of(launchers, &Machines::all_done,
                               [](const Launcher& each) -> const Machines& { return *each; });
  }));
}

// One that votes for whoever asks first.
class FirstComesFirst final : public Arbiter {
 public:
  std::string answer(const std::string&, const std::string& request) override { return Acceptor().answer(request); }
};

TEST_F(JobOfMachines, of_two_one_goes_on_with_the_arbiters_vote) {
  auto launchers = begin_job(meeting(1, 2), 2);
  launchers.clear();
  std::vector<std::future<Roster>> beginning;
  for (int i = 0; i < 2; ++i) beginning.push_back(std::async(std::launch::async, meet_nodes, meeting(1, 2)));
  Membership::Options options = options_of(meeting(1, 2));
  options.has_arbiter = true;
  for (auto& each : beginning)
    launchers.push_back(std::make_unique<Machines>(options, each.get(), std::make_shared<FirstComesFirst>()));
  launchers[0]->want_restart();
  ASSERT_TRUE(comes(launchers, [&] { return all_at(launchers, 1); }));
  launchers.pop_back();
  ASSERT_TRUE(comes(launchers, [&] { return all_at(launchers, 2); }));
  EXPECT_EQ(launchers[0]->epoch().world_size(), 1);
}

TEST(Arbiter, is_named_by_an_option) {
  EXPECT_FALSE(make_arbiter(""));
  EXPECT_TRUE(make_arbiter("etcd:a,b:2379"));
  for (const char* bad : {"etcd:", "etcd", "etcd:a:b", "slurm"}) EXPECT_THROW(make_arbiter(bad), UsageError) << bad;
}

}  // namespace
}  // namespace lockstep
