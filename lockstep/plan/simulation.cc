// SPDX-License-Identifier: Apache-2.0
#include "lockstep/plan/simulation.h"

#include <algorithm>
#include <limits>
#include <queue>
#include <utility>

#include "lockstep/base/text.h"
#include "lockstep/error.h"

namespace lockstep::plan {
namespace {

constexpr double kNever = std::numeric_limits<double>::infinity();
constexpr double kSameTime = 1e-12;  // seconds: events that are nearer are one

std::size_t place(int index) { return static_cast<std::size_t>(index); }

// A run from its first event to its last.
class Run {
 public:
  Run(const std::vector<Resource>& resources, const std::vector<Activity>& activities)
      : resources_(resources),
        activities_(activities),
        waits_for_(activities.size()),
        waited_for_by_(activities.size()),
        left_(activities.size()),
        speed_(activities.size()) {
    outcome_.activities.resize(activities.size());
    outcome_.busy.resize(resources.size());
    for (std::size_t i = 0; i < activities.size(); ++i) {
      waits_for_[i] = static_cast<int>(activities[i].after.size());
      for (const int before : activities[i].after) waited_for_by_[place(before)].push_back(static_cast<int>(i));
    }
  }

  Outcome finish() {
    for (std::size_t i = 0; i < activities_.size(); ++i)
      if (waits_for_[i] == 0) begin(static_cast<int>(i));
    while (!working_.empty() || !delayed_.empty()) next_event();
    if (ended_ < activities_.size()) throw UsageError({.what = "activities of a schedule wait for each other"});
    return std::move(outcome_);
  }

 private:
  void begin(int activity) {
    outcome_.activities[place(activity)].begin = now_;
    delayed_.emplace(now_ + activities_[place(activity)].delay, activity);
  }

  void end(int activity) {
    outcome_.activities[place(activity)].end = now_;
    outcome_.end = std::max(outcome_.end, now_);
    ++ended_;
    for (const int next : waited_for_by_[place(activity)])
      if (--waits_for_[place(next)] == 0) begin(next);
  }

  // To the next end of a delay or of some work.
  void next_event() {
    double next = delayed_.empty() ? kNever : delayed_.top().first;
    if (has_changed_) share_out();
    has_changed_ = false;
    for (const int activity : working_) next = std::min(next, now_ + left_[place(activity)] / speed_[place(activity)]);
    work_until(next);
    std::vector<int> ended;
    std::erase_if(working_, [&](int activity) {
      const bool over = left_[place(activity)] <= kSameTime * speed_[place(activity)];
      if (over) ended.push_back(activity);
      return over;
    });
    if (!ended.empty()) has_changed_ = true;
    for (const int activity : ended) end(activity);
    while (!delayed_.empty() && delayed_.top().first <= now_ + kSameTime) {
      const int activity = delayed_.top().second;
      delayed_.pop();
      const Activity& what = activities_[place(activity)];
      left_[place(activity)] = what.work;
      if (what.uses.empty() || what.work <= 0) {
        end(activity);
      } else {
        working_.push_back(activity);
        has_changed_ = true;
      }
    }
  }

  void work_until(double time) {
    if (time <= now_) return;
    std::vector<bool> used(resources_.size());
    for (const int activity : working_) {
      left_[place(activity)] -= speed_[place(activity)] * (time - now_);
      for (const int resource : activities_[place(activity)].uses) used[place(resource)] = true;
    }
    for (std::size_t i = 0; i < used.size(); ++i)
      if (used[i]) outcome_.busy[i] += time - now_;
    now_ = time;
  }

  // Again and again: the resource that has the least for each of its users gives each of them that.
  void share_out() {
    std::vector<int> users(resources_.size());
    for (const int activity : working_)
      for (const int resource : activities_[place(activity)].uses) ++users[place(resource)];
    std::vector<double> rest(resources_.size());
    for (std::size_t i = 0; i < rest.size(); ++i) rest[i] = users[i] == 0 ? 0 : speed_of(resources_[i], users[i]);
    std::vector<int> open = working_;
    while (!open.empty()) {
      double least = kNever;
      for (std::size_t i = 0; i < rest.size(); ++i)
        if (users[i] > 0) least = std::min(least, rest[i] / users[i]);
      std::vector<bool> is_scarce(rest.size());
      for (std::size_t i = 0; i < rest.size(); ++i)
        is_scarce[i] = users[i] > 0 && rest[i] / users[i] <= least * (1 + 1e-9);
      std::erase_if(open, [&](int activity) {
        const auto& uses = activities_[place(activity)].uses;
        if (std::ranges::none_of(uses, [&](int resource) { return is_scarce[place(resource)]; })) return false;
        speed_[place(activity)] = least;
        for (const int resource : uses) {
          rest[place(resource)] -= least;
          --users[place(resource)];
        }
        return true;
      });
    }
  }

  static double speed_of(const Resource& resource, int users) {
    const std::size_t last = resource.speed.size() - 1;
    return resource.speed[std::min(place(users - 1), last)];
  }

  using Delayed = std::pair<double, int>;
  const std::vector<Resource>& resources_;
  const std::vector<Activity>& activities_;
  std::vector<int> waits_for_;
  std::vector<std::vector<int>> waited_for_by_;
  std::vector<double> left_;   // of the work
  std::vector<double> speed_;  // units per second
  std::vector<int> working_;
  bool has_changed_ = false;  // working_, since its activities got their speeds
  std::priority_queue<Delayed, std::vector<Delayed>, std::greater<>> delayed_;
  double now_ = 0;
  std::size_t ended_ = 0;
  Outcome outcome_;
};

}  // namespace

int Simulation::add(Resource resource) {
  resources_.push_back(std::move(resource));
  return static_cast<int>(resources_.size()) - 1;
}

int Simulation::add(Activity activity) {
  activities_.push_back(std::move(activity));
  return static_cast<int>(activities_.size()) - 1;
}

Outcome Simulation::run() const {
  for (const Resource& resource : resources_)
    if (resource.speed.empty() || std::ranges::any_of(resource.speed, [](double speed) { return !(speed > 0); }))
      throw UsageError({.what = concat(resource.name, " has no speed")});
  return Run(resources_, activities_).finish();
}

}  // namespace lockstep::plan
