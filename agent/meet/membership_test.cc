// SPDX-License-Identifier: Apache-2.0
#include "agent/meet/membership.h"

#include <gtest/gtest.h>

#include <random>
#include <set>

#include "lockstep/base/text.h"

namespace lockstep {
namespace {

Member member(const std::string& id) {
  return {.id = id, .address = "10.0.0.1", .master_ports = {4001, 4002}, .ranks = 2};
}

// A store without a network: what launchers write, and those that live.
class Store {
 public:
  void write(const Presence& presence) {
    const std::string key = kPresence + presence.member.id;
    entries_[key] = {to_text(presence), entries_.contains(key) ? entries_[key].created : ++created_};
  }
  void forget(const std::string& id) { entries_.erase(kPresence + id); }
  bool replace(const std::string& expected, const JobRecord& record) {
    if (entries_[kRecord].value != expected) return false;
    entries_[kRecord].value = to_text(record);
    return true;
  }
  JobView view() const { return JobView(entries_); }

 private:
  MembershipStore::Entries entries_;
  int64_t created_ = 0;
};

// Launchers that look at the store in turn, 50 ms apart.
class Job {
 public:
  Job(int least, int most, bool replaces = true)
      : meeting_{.least = least, .most = most, .replaces = replaces, .last_call = milliseconds(1000)} {}

  void come(const std::string& id) {
    members_.push_back({Membership(meeting_, id), {.member = member(id)}});
    store.write(members_.back().presence);
  }
  Presence& of(const std::string& id) {
    for (auto& each : members_)
      if (each.presence.member.id == id) return each.presence;
    throw std::out_of_range(id);
  }
  void lose(const std::string& id) {
    std::erase_if(members_, [&](const auto& each) { return each.presence.member.id == id; });
    store.forget(id);
  }
  void pass(milliseconds time) {
    for (const milliseconds end = now_ + time; now_ < end; now_ += milliseconds(50))
      for (auto& [membership, presence] : members_) turn(membership, presence);
  }
  Epoch epoch() const { return store.view().record.value().epoch; }
  std::vector<std::string> ids() const {
    std::vector<std::string> ids;
    for (const Member& each : epoch().members) ids.push_back(each.id);
    return ids;
  }
  std::optional<std::string> ended() const { return store.view().record.value().ended; }

  Store store;

 private:
  struct One {
    Membership membership;
    Presence presence;
  };
  void turn(Membership& membership, Presence& presence) {
    const JobView view = store.view();
    if (view.runs() && view.record->epoch.has(presence.member.id) && view.record->epoch.number > presence.epoch)
      presence = {.member = presence.member, .epoch = view.record->epoch.number};
    store.write(presence);
    if (const auto next = membership.next(view, now_)) store.replace(view.record_text, *next);
  }

  Meeting meeting_;
  std::vector<One> members_;
  milliseconds now_{};
};

using Ids = std::vector<std::string>;

TEST(Membership, begins_at_once_when_all_have_come_in_the_order_in_which_they_came) {
  Job job(2, 3);
  for (const char* id : {"c", "a", "b"}) job.come(id);
  job.pass(milliseconds(100));
  EXPECT_EQ(job.ids(), (Ids{"c", "a", "b"}));
  EXPECT_EQ(job.epoch().number, 0);
}

TEST(Membership, begins_with_fewer_after_the_last_call_and_not_with_too_few) {
  Job job(2, 3);
  job.come("a");
  job.pass(milliseconds(5000));
  EXPECT_FALSE(job.store.view().record);
  job.come("b");
  job.pass(milliseconds(900));
  EXPECT_FALSE(job.store.view().record);
  job.pass(milliseconds(300));
  EXPECT_EQ(job.ids(), (Ids{"a", "b"}));
}

TEST(Membership, goes_on_without_who_is_lost_also_without_the_first) {
  Job job(1, 3);
  for (const char* id : {"a", "b", "c"}) job.come(id);
  job.pass(milliseconds(200));
  job.lose("a");
  job.pass(milliseconds(500));
  EXPECT_EQ(job.ids(), (Ids{"b", "c"}));
  EXPECT_EQ(job.epoch().number, 1);
  EXPECT_EQ(job.epoch().restarts, 0);
}

TEST(Membership, machines_lost_together_cost_one_epoch) {
  Job job(1, 4);
  for (const char* id : {"a", "b", "c", "d"}) job.come(id);
  job.pass(milliseconds(200));
  job.lose("b");
  job.pass(milliseconds(50));
  job.lose("a");
  job.pass(milliseconds(500));
  EXPECT_EQ(job.ids(), (Ids{"c", "d"}));
  EXPECT_EQ(job.epoch().number, 1);
}

TEST(Membership, ends_when_too_few_are_left) {
  Job job(2, 3);
  for (const char* id : {"a", "b", "c"}) job.come(id);
  job.pass(milliseconds(200));
  job.lose("a");
  job.lose("b");
  job.pass(milliseconds(500));
  EXPECT_EQ(job.ended(), "only 1 machines are left, and --nnodes asks for at least 2");
}

TEST(Membership, a_lost_rank_begins_an_epoch_of_the_same_machines_that_counts_one_restart) {
  Job job(2, 2);
  job.come("a");
  job.come("b");
  job.pass(milliseconds(200));
  job.of("b").wants_restart = true;
  job.pass(milliseconds(1000));
  EXPECT_EQ(job.epoch().number, 1);
  EXPECT_EQ(job.epoch().restarts, 1);
  EXPECT_EQ(job.ids(), (Ids{"a", "b"}));
}

TEST(Membership, takes_a_new_machine_in_where_there_is_room) {
  Job job(1, 3);
  job.come("a");
  job.pass(milliseconds(1200));
  for (const char* id : {"b", "c", "d"}) job.come(id);
  job.pass(milliseconds(1000));
  EXPECT_EQ(job.ids(), (Ids{"a", "b", "c"}));
  job.lose("b");
  job.pass(milliseconds(1000));
  EXPECT_EQ(job.ids(), (Ids{"a", "c", "d"}));
}

TEST(Membership, who_wants_to_leave_is_left_out_also_the_first) {
  Job job(1, 2);
  job.come("a");
  job.come("b");
  job.pass(milliseconds(200));
  job.of("a").wants_to_leave = true;
  job.pass(milliseconds(500));
  EXPECT_EQ(job.ids(), (Ids{"b"}));
}

TEST(Membership, is_over_when_all_have_finished_and_not_before) {
  Job job(1, 2);
  job.come("a");
  job.come("b");
  job.pass(milliseconds(200));
  job.of("a").has_finished = true;
  job.pass(milliseconds(500));
  EXPECT_FALSE(job.ended());
  job.of("b").has_finished = true;
  job.pass(milliseconds(500));
  EXPECT_EQ(job.ended(), "");
}

TEST(Membership, without_restarts_a_lost_machine_ends_the_job_and_none_is_taken_in) {
  Job job(1, 3, /*replaces=*/false);
  job.come("a");
  job.come("b");
  job.pass(milliseconds(1200));
  job.come("c");
  job.pass(milliseconds(1000));
  EXPECT_EQ(job.ids(), (Ids{"a", "b"}));
  job.lose("b");
  job.pass(milliseconds(500));
  EXPECT_EQ(job.ended(), "lost machine b");
}

// Its name is used again: the store may still have the record.
TEST(Membership, a_job_without_machines_left_starts_over) {
  Job job(1, 1);
  job.come("a");
  job.pass(milliseconds(200));
  job.lose("a");
  job.come("b");
  job.pass(milliseconds(200));
  EXPECT_EQ(job.ids(), (Ids{"b"}));
  EXPECT_EQ(job.epoch().number, 0);
}

// Launchers come, go and wish at random. Of no number are there ever two epochs, and who is left always goes on.
TEST(Membership, whatever_happens_there_is_one_epoch_of_each_number) {
  for (unsigned seed = 0; seed < 40; ++seed) {
    std::mt19937 random(seed);
    Job job(1, 4);
    std::set<std::string> there;
    int last = -1;
    for (int turn = 0; turn < 60; ++turn) {
      const std::string one =
          there.empty() ? "" : *std::next(there.begin(), static_cast<long>(random() % there.size()));
      switch (random() % 5) {
        case 0: {
          const std::string id = concat("m", turn);
          job.come(id);
          there.insert(id);
          break;
        }
        case 1:
          if (there.size() > 1) {
            job.lose(one);
            there.erase(one);
          }
          break;
        case 2:
          if (!one.empty()) job.of(one).wants_restart = true;
          break;
        default: break;
      }
      job.pass(milliseconds(random() % 300));
      const auto record = job.store.view().record;
      if (!record) continue;
      if (record->epoch.number > 0) {  // else nobody was left of the job before
        ASSERT_GE(record->epoch.number, last) << seed;
      }
      last = record->epoch.number;
    }
    if (there.empty()) continue;
    job.pass(milliseconds(3000));
    EXPECT_EQ(std::ssize(job.ids()), std::min<ptrdiff_t>(4, std::ssize(there))) << seed;
    for (const std::string& id : job.ids()) EXPECT_TRUE(there.contains(id)) << seed;
  }
}

TEST(Membership, texts_are_read_as_they_were_written) {
  const JobRecord record{.epoch = {.number = 3, .restarts = 1, .members = {member("a"), member("b")}},
                         .ended = "two\nlines"};
  EXPECT_EQ(to_text(parse_record(to_text(record)).value()), to_text(record));
  EXPECT_FALSE(parse_record("3 1"));
  EXPECT_FALSE(parse_record("{}"));
  EXPECT_FALSE(parse_record(to_text(JobRecord{.epoch = {.members = {member("a"), member("a")}}}))) << "one twice";
  EXPECT_FALSE(parse_record(to_text(JobRecord{.epoch = {.members = {{.id = "a", .address = "b"}}}}))) << "no ports";
  EXPECT_FALSE(parse_presence("a"));
  const Presence presence{.member = member("a"), .epoch = 2, .wants_to_leave = true};
  EXPECT_EQ(to_text(parse_presence(to_text(presence)).value()), to_text(presence));
}

}  // namespace
}  // namespace lockstep
