// SPDX-License-Identifier: Apache-2.0
#include "lockstep/launch/membership.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <deque>
#include <functional>
#include <memory>
#include <random>

#include "lockstep/base/text.h"
#include "tests/support.h"

namespace lockstep {
namespace {

using std::chrono::milliseconds;

Member machine(int number) {
  return {.id = concat("m", number, "/1/", number), .address = "10.0.0.1", .port = 1, .master_ports = {2, 3}};
}

// Launchers, a network between them and a clock, all simulated: step() is 10 ms for everybody who is awake.
class Launchers {
 public:
  explicit Launchers(int machines, Membership::Options options = {.least = 1, .most = 9}, unsigned seed = 1)
      : options_(options), random_(seed) {
    Epoch first;
    for (int i = 0; i < machines; ++i) first.members.push_back(machine(i));
    for (int i = 0; i < machines; ++i) start(i, first);
  }

  Membership& at(int number) { return *launchers_.at(machine(number).id).membership; }
  int epoch(int number) { return at(number).epoch().number; }

  // Its kernel tells the others that the connections are closed.
  void kill(int number) {
    crash(number);
    for (auto& [id, launcher] : launchers_) launcher.membership->close(machine(number).id, "its connection is closed");
  }
  // Without a word to anybody.
  void crash(int number) { launchers_.erase(machine(number).id); }
  void stop(int number) { launchers_.at(machine(number).id).stopped = true; }
  void go_on(int number) { launchers_.at(machine(number).id).stopped = false; }

  void cut(int one, int other) { cuts_.insert({std::min(one, other), std::max(one, other)}); }
  void heal(int one, int other) { cuts_.erase({std::min(one, other), std::max(one, other)}); }
  void lose_messages(double share) { lost_share_ = share; }

  // A new machine asks the launcher of another one.
  void join(int number, int contact) {
    at(contact).admit(machine(number));
    guests_.insert(machine(number).id);
  }

  void pass(milliseconds time) {
    for (milliseconds passed{}; passed < time; passed += kStep) step();
  }
  // Within the time, checked each 10 ms.
  bool comes(const std::function<bool()>& condition, milliseconds within = milliseconds(30'000)) {
    for (milliseconds passed{}; passed < within && !condition(); passed += kStep) step();
    return condition();
  }
  bool all_have(const std::vector<int>& numbers, const std::vector<int>& members) {
    return std::ranges::all_of(numbers, [&](int number) {
      if (!launchers_.contains(machine(number).id)) return false;
      const Epoch& epoch = at(number).epoch();
      if (epoch.members.size() != members.size()) return false;
      return std::ranges::all_of(members, [&](int member) { return epoch.has(machine(member).id); });
    });
  }

  Acceptor arbiter;
  bool arbiter_answers = false;
  int most_delay_ms = 30;

 private:
  static constexpr milliseconds kStep{10};
  struct Launcher {
    std::unique_ptr<Membership> membership;
    bool stopped = false;
    std::deque<std::pair<std::string, std::string>> waiting{};  // while it is stopped
  };
  struct UnderWay {
    milliseconds arrives;
    std::string from;
    std::string to;
    std::string text;
  };

  void start(int number, const Epoch& epoch) {
    launchers_[machine(number).id].membership = std::make_unique<Membership>(options_, machine(number).id, epoch);
  }

  static int number_of(const std::string& id) { return id[1] - '0'; }

  bool is_cut(const std::string& one, const std::string& other) const {
    const int a = number_of(one), b = number_of(other);
    return cuts_.contains({std::min(a, b), std::max(a, b)});
  }

  void step() {
    now_ += kStep;
    for (auto& [id, launcher] : launchers_)
      if (!launcher.stopped) launcher.membership->pass(kStep);
    for (auto& [id, launcher] : launchers_) send_all(id, launcher);
    deliver();
    check();
  }

  void send_all(const std::string& from, Launcher& launcher) {
    for (auto& [to, text] : launcher.membership->take_messages()) {
      if (to == kArbiter) {
        if (arbiter_answers) under_way_.push_back({now_ + kStep, kArbiter, from, arbiter.answer(text)});
      } else if (!is_cut(from, to) && std::uniform_real_distribution(0.0, 1.0)(random_) >= lost_share_) {
        const auto delay = [&] { return milliseconds(std::uniform_int_distribution(1, most_delay_ms)(random_)); };
        under_way_.push_back({now_ + delay(), from, to, text});
        if (lost_share_ > 0 && text.size() % 3 == 0) under_way_.push_back({now_ + delay(), from, to, text});  // twice
      }
    }
  }

  void deliver() {
    std::vector<UnderWay> arrived;
    std::erase_if(under_way_, [&](UnderWay& one) {
      if (one.arrives > now_) return false;
      arrived.push_back(std::move(one));
      return true;
    });
    for (UnderWay& one : arrived) {
      if (one.text.starts_with("decided ") && guests_.contains(one.to)) begin(one);
      const auto found = launchers_.find(one.to);
      if (found == launchers_.end()) continue;
      found->second.waiting.emplace_back(one.from, one.text);
    }
    for (auto& [id, launcher] : launchers_) {
      while (!launcher.stopped && !launcher.waiting.empty()) {
        const auto [from, text] = launcher.waiting.front();
        launcher.waiting.pop_front();
        launcher.membership->hear(from, text);
      }
    }
  }

  void begin(const UnderWay& told) {
    guests_.erase(told.to);
    start(number_of(told.to), *parse_epoch(told.text.substr(8)));
  }

  // What may never happen: two epochs of one number.
  void check() {
    for (const auto& [id, launcher] : launchers_) {
      const Epoch& epoch = launcher.membership->epoch();
      const auto& first = agreed_.try_emplace(epoch.number, to_text(epoch)).first->second;
      ASSERT_EQ(first, to_text(epoch));
    }
  }

  Membership::Options options_;
  std::mt19937 random_;
  std::map<std::string, Launcher> launchers_;
  std::vector<UnderWay> under_way_;
  std::set<std::pair<int, int>> cuts_;
  std::set<std::string> guests_;
  std::map<int, std::string> agreed_;
  milliseconds now_{};
  double lost_share_ = 0;
};

TEST(Membership, stays_as_it_is_while_nothing_happens) {
  Launchers job(4);
  job.pass(milliseconds(60'000));
  for (int i = 0; i < 4; ++i) EXPECT_EQ(job.epoch(i), 0);
}

TEST(Membership, a_killed_launcher_is_left_out_at_once) {
  Launchers job(3);
  job.pass(milliseconds(1000));
  job.kill(1);
  EXPECT_TRUE(job.comes([&] { return job.all_have({0, 2}, {0, 2}); }, milliseconds(500)));
  job.pass(milliseconds(10'000));
  EXPECT_EQ(job.epoch(0), 1);
}

TEST(Membership, the_first_machine_has_a_successor) {
  Launchers job(3);
  job.pass(milliseconds(1000));
  job.kill(0);
  EXPECT_TRUE(job.comes([&] { return job.all_have({1, 2}, {1, 2}); }, milliseconds(500)));
  EXPECT_EQ(job.at(1).epoch().members.front().id, machine(1).id);
}

TEST(Membership, a_silent_machine_is_left_out_after_three_seconds) {
  for (const int lost : {0, 1, 3}) {
    Launchers job(4);
    job.pass(milliseconds(1000));
    job.crash(lost);
    job.pass(milliseconds(2500));
    const int other = lost == 0 ? 1 : 0;
    EXPECT_EQ(job.epoch(other), 0);
    std::vector<int> left;
    for (int i = 0; i < 4; ++i)
      if (i != lost) left.push_back(i);
    EXPECT_TRUE(job.comes([&] { return job.all_have(left, left); }, milliseconds(1500)));
  }
}

TEST(Membership, machines_lost_together_cost_one_epoch) {
  Launchers job(5);
  job.pass(milliseconds(1000));
  job.kill(0);
  job.kill(3);
  EXPECT_TRUE(job.comes([&] { return job.all_have({1, 2, 4}, {1, 2, 4}); }, milliseconds(1000)));
  EXPECT_EQ(job.epoch(1), 1);
}

TEST(Membership, loses_machines_one_after_the_other_down_to_a_majority_of_two) {
  Launchers job(5);
  job.pass(milliseconds(1000));
  for (int lost = 0; lost < 3; ++lost) {
    job.kill(lost);
    std::vector<int> left;
    for (int i = lost + 1; i < 5; ++i) left.push_back(i);
    EXPECT_TRUE(job.comes([&] { return job.all_have(left, left); }));
  }
  job.kill(3);
  EXPECT_TRUE(job.comes([&] { return job.at(4).end().has_value(); }, milliseconds(100)));
  EXPECT_EQ(*job.at(4).end(),
            "only 1 of 2 machines are left on this side, and of exactly half an arbiter has to say which goes on");
}

TEST(Membership, the_smaller_side_of_a_cut_stops_and_the_larger_goes_on) {
  for (const bool first_is_alone : {true, false}) {
    Launchers job(3);
    job.pass(milliseconds(1000));
    const int alone = first_is_alone ? 0 : 2;
    const std::vector<int> side = first_is_alone ? std::vector{1, 2} : std::vector{0, 1};
    for (const int other : side) job.cut(alone, other);
    EXPECT_TRUE(job.comes([&] { return job.at(alone).end() && job.all_have(side, side); }, milliseconds(5000)));
    EXPECT_EQ(*job.at(alone).end(), "only 1 of 3 machines are left on this side, and more than half have to go on");
    EXPECT_FALSE(job.at(side[0]).end());
  }
}

TEST(Membership, of_two_halves_none_goes_on_without_an_arbiter) {
  Launchers job(4);
  job.pass(milliseconds(1000));
  for (const int one : {0, 1})
    for (const int other : {2, 3}) job.cut(one, other);
  EXPECT_TRUE(job.comes([&] {
    return std::ranges::all_of(std::array{0, 1, 2, 3}, [&](int i) { return job.at(i).end().has_value(); });
  }));
}

TEST(Membership, of_two_halves_the_arbiter_lets_one_go_on) {
  for (unsigned seed = 1; seed <= 20; ++seed) {
    Launchers job(2, {.least = 1, .most = 2, .has_arbiter = true}, seed);
    job.arbiter_answers = true;
    job.pass(milliseconds(1000));
    job.cut(0, 1);
    const auto goes_on = [&](int i) { return job.all_have({i}, {i}); };
    ASSERT_TRUE(job.comes([&] { return goes_on(0) || goes_on(1); }, milliseconds(8000))) << seed;
    const int loser = goes_on(0) ? 1 : 0;
    ASSERT_TRUE(job.comes([&] { return !job.at(loser).is_member(); })) << seed;
  }
}

TEST(Membership, a_silent_arbiter_ends_both_halves) {
  Launchers job(2, {.least = 1, .most = 2, .patience = milliseconds(20'000), .has_arbiter = true});
  job.pass(milliseconds(1000));
  job.cut(0, 1);
  EXPECT_TRUE(job.comes([&] { return job.at(0).end() && job.at(1).end(); }));
  EXPECT_TRUE(testing::contains(*job.at(0).end(), "the arbiter has not said that this side goes on"))
      << *job.at(0).end();
}

TEST(Membership, needs_the_least_number_of_machines) {
  Launchers job(4, {.least = 3, .most = 4});
  job.pass(milliseconds(1000));
  job.kill(0);
  EXPECT_TRUE(job.comes([&] { return job.all_have({1, 2, 3}, {1, 2, 3}); }));
  job.kill(1);
  EXPECT_TRUE(job.comes([&] { return job.at(2).end().has_value(); }));
  EXPECT_EQ(*job.at(2).end(), "only 2 machines are left, and --nnodes asks for at least 3");
}

TEST(Membership, a_launcher_that_was_stopped_for_less_than_the_silence_stays) {
  Launchers job(3);
  job.pass(milliseconds(1000));
  for (const int stopped : {0, 2}) {
    job.stop(stopped);
    job.pass(milliseconds(2000));
    job.go_on(stopped);
    job.pass(milliseconds(5000));
  }
  for (int i = 0; i < 3; ++i) EXPECT_EQ(job.epoch(i), 0);
}

TEST(Membership, a_launcher_that_was_stopped_for_longer_hears_that_it_is_left_out) {
  Launchers job(3);
  job.pass(milliseconds(1000));
  job.stop(0);
  EXPECT_TRUE(job.comes([&] { return job.all_have({1, 2}, {1, 2}); }, milliseconds(5000)));
  job.go_on(0);
  EXPECT_TRUE(job.comes([&] { return !job.at(0).is_member(); }));
  EXPECT_EQ(job.epoch(1), 1);
}

TEST(Membership, of_two_machines_that_do_not_hear_each_other_the_later_one_goes) {
  Launchers job(4);
  job.pass(milliseconds(1000));
  job.cut(1, 2);
  EXPECT_TRUE(job.comes([&] { return job.all_have({0, 1, 3}, {0, 1, 3}) && !job.at(2).is_member(); }));
  EXPECT_EQ(job.epoch(0), 1);
}

TEST(Membership, takes_a_new_machine_in) {
  Launchers job(2);
  job.pass(milliseconds(1000));
  job.join(5, 1);  // who is not the first
  EXPECT_TRUE(job.comes([&] { return job.all_have({0, 1}, {0, 1, 5}); }, milliseconds(2000)));
  EXPECT_TRUE(job.comes([&] { return job.all_have({5}, {0, 1, 5}); }));
  EXPECT_EQ(job.at(0).epoch().index_of(machine(5).id), 2);
  job.pass(milliseconds(20'000));
  EXPECT_EQ(job.epoch(5), 1);
}

TEST(Membership, takes_in_no_more_than_the_most) {
  Launchers job(2, {.least = 1, .most = 3});
  job.join(5, 0);
  job.join(6, 1);
  EXPECT_TRUE(job.comes([&] { return job.at(0).epoch().members.size() == 3; }));
  job.pass(milliseconds(20'000));
  EXPECT_EQ(job.epoch(0), 1);
  job.kill(1);
  job.pass(milliseconds(20'000));
  EXPECT_EQ(job.at(0).epoch().members.size(), job.at(0).epoch().has(machine(6).id) ? 3U : 2U);
}

TEST(Membership, a_rank_that_failed_costs_a_restart_and_no_machine) {
  Launchers job(3);
  job.at(2).want_restart();
  EXPECT_TRUE(
      job.comes([&] { return job.epoch(0) == 1 && job.epoch(1) == 1 && job.epoch(2) == 1; }, milliseconds(1000)));
  EXPECT_EQ(job.at(1).epoch().restarts, 1);
  EXPECT_EQ(job.at(1).epoch().members.size(), 3U);
  job.pass(milliseconds(10'000));
  EXPECT_EQ(job.epoch(1), 1);
}

TEST(Membership, a_machine_that_leaves_needs_no_arbiter) {
  for (const int leaver : {0, 1}) {
    Launchers job(2);
    job.at(leaver).want_to_leave();
    const int stays = 1 - leaver;
    EXPECT_TRUE(
        job.comes([&] { return job.all_have({stays}, {stays}) && !job.at(leaver).is_member(); }, milliseconds(2000)));
  }
}

TEST(Membership, launchers_that_have_finished_are_not_missed) {
  Launchers job(3);
  for (int i = 0; i < 3; ++i) job.at(i).finish();
  EXPECT_TRUE(job.comes([&] { return job.at(0).all_done(); }));
  EXPECT_TRUE(job.comes([&] { return job.at(1).all_done() && job.at(2).all_done(); }));
  job.kill(0);
  job.pass(milliseconds(10'000));
  EXPECT_EQ(job.epoch(1), 0);
  EXPECT_FALSE(job.at(1).end());
}

// The last words of the others are lost with their connections.
TEST(Membership, a_launcher_that_has_finished_needs_nobody) {
  for (const bool has_finished : {true, false}) {
    Launchers job(3);
    job.pass(milliseconds(200));
    if (has_finished) job.at(1).finish();
    job.kill(0);
    job.kill(2);
    job.pass(milliseconds(20));
    EXPECT_EQ(job.at(1).all_done(), has_finished);
    EXPECT_EQ(job.at(1).end().has_value(), !has_finished);
  }
}

// One that others could not reach when they said that they had finished.
TEST(Membership, a_launcher_that_connects_late_hears_that_the_others_have_finished) {
  Launchers job(3);
  job.cut(0, 2);
  job.cut(1, 2);
  job.at(0).finish();
  job.at(1).finish();
  job.pass(milliseconds(1000));
  job.heal(0, 2);
  job.heal(1, 2);
  job.at(2).finish();
  std::set<int> there{0, 1};
  EXPECT_TRUE(job.comes([&] {
    std::erase_if(there, [&](int other) {
      const bool goes = job.at(other).all_done();
      if (goes) job.crash(other);
      return goes;
    });
    return job.at(2).all_done();
  }));
}

// Whatever happens, no two launchers have two epochs of one number (checked at every step); and a majority that is left in
// peace agrees.
TEST(Membership, never_agrees_on_two_epochs_of_one_number) {
  int agreed = 0;
  for (unsigned seed = 1; seed <= 60; ++seed) {
    std::mt19937 random(seed);
    const auto any = [&](int most) { return std::uniform_int_distribution(0, most)(random); };
    const int machines = 2 + any(4);
    Launchers job(machines, {.least = 1, .most = 9, .patience = milliseconds(600'000), .has_arbiter = seed % 2 == 0},
                  seed);
    job.arbiter_answers = true;
    job.most_delay_ms = 10 + 300 * any(1);
    job.lose_messages(0.1 * any(3));
    std::set<int> gone;
    for (int event = 0; event < 4; ++event) {
      job.pass(milliseconds(10 * any(400)));
      if (::testing::Test::HasFatalFailure()) FAIL() << "seed " << seed;
      const int one = any(machines - 1), other = any(machines - 1);
      switch (any(4)) {
        case 0:
          if (gone.insert(one).second) job.kill(one);
          break;
        case 1:
          if (gone.insert(one).second) job.crash(one);
          break;
        case 2:
          if (one != other) job.cut(one, other);
          break;
        case 3:
          if (!gone.contains(one)) job.at(one).want_restart();
          break;
        default:
          if (!gone.contains(one)) {
            job.stop(one);
            job.pass(milliseconds(10 * any(500)));
            job.go_on(one);
          }
      }
    }
    job.lose_messages(0);
    job.pass(milliseconds(30'000));
    if (::testing::Test::HasFatalFailure()) FAIL() << "seed " << seed;
    for (int i = 0; i < machines; ++i)
      if (!gone.contains(i) && job.at(i).is_member() && !job.at(i).end()) {
        ++agreed;
        EXPECT_TRUE(job.at(i).lost().empty()) << "seed " << seed << ", machine " << i;
      }
  }
  EXPECT_GT(agreed, 60);
}

// The test above finds what it looks for: launchers that take less than a majority.
TEST(Acceptor, two_proposers_decide_one_value) {
  std::map<std::string, Acceptor> voters{{"a", {}}, {"b", {}}, {"c", {}}};
  Proposal one(1, 1, 2), two(1, 2, 2);
  const auto ask = [&](Proposal& proposal, const std::string& voter, const std::string& request) {
    proposal.hear(voter, voters[voter].answer(request));
  };
  for (const char* voter : {"a", "b"}) ask(one, voter, one.prepare());
  ask(one, "a", one.accept("first"));
  ask(one, "b", one.accept("first"));
  EXPECT_TRUE(one.is_decided());
  for (const char* voter : {"b", "c"}) ask(two, voter, two.prepare());
  ASSERT_TRUE(two.has_promises());
  two.accept("second");
  EXPECT_EQ(two.value(), "first");
}

TEST(Acceptor, promises_and_takes_nothing_lower) {
  Acceptor voter;
  EXPECT_EQ(voter.answer("prepare 4 10"), "promised 4 10 0");
  EXPECT_EQ(voter.answer("prepare 4 9"), "higher 4 9 10");
  EXPECT_EQ(voter.answer("accept 4 9 x y"), "higher 4 9 10");
  EXPECT_EQ(voter.answer("accept 4 10 x y"), "accepted 4 10");
  voter = Acceptor::parse(voter.text());
  EXPECT_EQ(voter.answer("prepare 4 11"), "promised 4 11 10 x y");
  EXPECT_EQ(voter.answer("nonsense"), "");
}

TEST(Epoch, is_read_as_it_was_written) {
  Epoch epoch{.number = 7, .restarts = 2, .members = {machine(1), machine(4)}};
  epoch.members[1].address = "fd00::1";
  epoch.members[1].ranks = 8;
  const auto read = parse_epoch(to_text(epoch));
  ASSERT_TRUE(read);
  EXPECT_EQ(to_text(*read), to_text(epoch));
  EXPECT_EQ(read->world_size(), 9);
  EXPECT_EQ(read->first_rank(machine(4).id), 1);
  for (const char* bad : {"", "1", "1 0", "x 0 a,b,1,2,3,1", "1 0 a,b,0,2,3,1", "1 0 a,b,1,2,3,0", "1 0 a,b,1,2,3",
                          "1 0 a,b,1,2,3,1 a,b,1,2,3,1"})
    EXPECT_FALSE(parse_epoch(bad)) << bad;
}

}  // namespace
}  // namespace lockstep
