// SPDX-License-Identifier: Apache-2.0
#include "tools/plan/simulation.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <set>
#include <utility>

#include "lockstep/base/text.h"
#include "lockstep/error.h"

namespace lockstep::plan {
namespace {

constexpr double kNever = std::numeric_limits<double>::infinity();
constexpr double kSameTime = 1e-12;  // seconds: events that are nearer are one

// A run from its first event to its last. When an activity begins or ends, only those that share resources with it, directly or
// through others, get another speed: machines that do not communicate at that moment cost nothing.
class Run {
 public:
  explicit Run(const Simulation& simulation)
      : resources_(simulation.resources),
        activities_(simulation.activities),
        waits_for_(activities_.size()),
        waited_for_by_(activities_.size()),
        work_(activities_.size()),
        shares_(resources_.size()) {
    outcome_.activities.resize(activities_.size());
    for (int i = 0; i < activities_.size(); ++i) {
      waits_for_[i] = activities_[i].after.size();
      for (const int before : activities_[i].after) waited_for_by_[before].push_back(i);
    }
  }

  Outcome finish() {
    for (int i = 0; i < activities_.size(); ++i)
      if (waits_for_[i] == 0) begin(i);
    while (!delayed_.empty() || !ends_.empty()) next_event();
    if (ended_ < activities_.size()) throw UsageError({.what = "activities of a schedule wait for each other"});
    return std::move(outcome_);
  }

 private:
  void begin(int activity) {
    outcome_.activities[activity].begin = now_;
    delayed_.emplace(now_ + activities_[activity].delay, activity);
  }

  void end(int activity) {
    outcome_.activities[activity].end = now_;
    outcome_.end = std::max(outcome_.end, now_);
    ++ended_;
    for (const int next : waited_for_by_[activity])
      if (--waits_for_[next] == 0) begin(next);
  }

  // Goes to the next end of a delay or of some work.
  void next_event() {
    const auto first = [](const std::set<Event>& events) { return events.empty() ? kNever : events.begin()->first; };
    now_ = std::min(first(delayed_), first(ends_));
    Ids ended;
    while (first(ends_) <= now_ + kSameTime) {
      ended.push_back(ends_.begin()->second);
      stop_work(ended.back());
    }
    for (const int activity : ended) end(activity);
    while (first(delayed_) <= now_ + kSameTime) start_work(delayed_.extract(delayed_.begin()).value().second);
    share_out();
  }

  void start_work(int activity) {
    const Activity& what = activities_[activity];
    if (what.uses.empty() || what.work <= 0) return end(activity);
    work_[activity] = {.left = what.work, .since = now_};
    for (const int resource : what.uses) {
      shares_[resource].users.push_back(activity);
      changed_.push_back(resource);
    }
  }

  void stop_work(int activity) {
    ends_.erase({work_[activity].end, activity});
    for (const int resource : activities_[activity].uses) {
      std::erase(shares_[resource].users, activity);
      changed_.push_back(resource);
    }
  }

  // Repeats until all have a speed: the resource with the least for each of its users gives each of them that.
  void share_out() {
    Ids open;
    const Ids resources = reached_from_changed(open);
    std::ranges::sort(open);
    for (const int resource : resources) {
      Share& share = shares_[resource];
      share.open = share.users.size();
      const auto& speed = resources_[resource].speed;
      share.rest = share.open > 0 ? speed[std::min(share.open, speed.size()) - 1] : 0;
    }
    while (!open.empty()) give_to_users_of_the_scarcest(resources, open);
  }

  // Returns all resources that users of the changed ones use, and users of those, and so on; `activities`: their users.
  Ids reached_from_changed(Ids& activities) {
    ++round_;
    Ids resources;
    const auto reach = [&](int resource) {
      if (std::exchange(shares_[resource].round, round_) != round_) resources.push_back(resource);
    };
    for (const int resource : changed_) reach(resource);
    changed_.clear();
    for (int i = 0; i < resources.size(); ++i)
      for (const int activity : shares_[resources[i]].users) {
        if (std::exchange(work_[activity].round, round_) == round_) continue;
        activities.push_back(activity);
        for (const int resource : activities_[activity].uses) reach(resource);
      }
    return resources;
  }

  void give_to_users_of_the_scarcest(const Ids& resources, Ids& open) {
    double least = kNever;
    for (const int resource : resources) least = std::min(least, shares_[resource].for_each());
    for (const int resource : resources) {
      Share& share = shares_[resource];
      share.is_scarce = share.for_each() <= least * (1 + 1e-9);
    }
    std::erase_if(open, [&](int activity) {
      const auto& uses = activities_[activity].uses;
      if (std::ranges::none_of(uses, [&](int resource) { return shares_[resource].is_scarce; })) return false;
      give(activity, least);
      for (const int resource : uses) {
        shares_[resource].rest -= least;
        --shares_[resource].open;
      }
      return true;
    });
  }

  void give(int activity, double speed) {
    Work& work = work_[activity];
    if (work.speed == speed) return;
    if (work.speed > 0) ends_.erase({work.end, activity});
    work.left -= work.speed * (now_ - work.since);
    work.since = now_;
    work.speed = speed;
    work.end = now_ + std::max(0.0, work.left) / speed;
    ends_.emplace(work.end, activity);
  }

  struct Work {
    double left = 0;  // units, at `since`
    double since = 0;
    double speed = 0;  // units per second; 0: it has no share yet
    double end = 0;    // at this speed
    int round = 0;
  };
  struct Share {
    Ids users{};      // activities that work
    int open = 0;     // users that have no share yet
    double rest = 0;  // what they share
    bool is_scarce = false;
    int round = 0;
    double for_each() const { return open > 0 ? rest / open : kNever; }
  };
  using Event = std::pair<double, int>;

  const IntVector<Resource>& resources_;
  const IntVector<Activity>& activities_;
  Ids waits_for_;
  IntVector<Ids> waited_for_by_;
  IntVector<Work> work_;
  IntVector<Share> shares_;
  std::set<Event> delayed_;  // the ends of delays
  std::set<Event> ends_;     // of the activities that work
  Ids changed_;              // resources whose users are others than when shares were given
  int round_ = 0;            // of share_out()
  double now_ = 0;
  int ended_ = 0;
  Outcome outcome_;
};

}  // namespace

Ids consecutive(int first, int count) {
  Ids ids(count);
  std::iota(ids.begin(), ids.end(), first);
  return ids;
}

int Simulation::add(Resource resource) {
  resources.push_back(std::move(resource));
  return resources.size() - 1;
}

int Simulation::add(Activity activity) {
  activities.push_back(std::move(activity));
  return activities.size() - 1;
}

Outcome Simulation::run() const {
  for (const Resource& resource : resources)
    if (resource.speed.empty() || std::ranges::any_of(resource.speed, [](double speed) { return !(speed > 0); }))
      throw UsageError({.what = concat(resource.name, " has no speed")});
  for (const Activity& each : activities)
    for (const double amount : {each.delay, each.work})
      if (!std::isfinite(amount) || amount < 0)
        throw UsageError({.what = concat("\"", each.name, "\" can't take ", amount),
                          .likely = "a number of the profile or the target that can't be"});
  return Run(*this).finish();
}

}  // namespace lockstep::plan
