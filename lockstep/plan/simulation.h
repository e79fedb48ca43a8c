// SPDX-License-Identifier: Apache-2.0
// plan/simulation.h: what happens when, in a step that is described as activities: each waits for others, then works on what
// all activities share (the cores of a machine, its memory, each direction of a link).
//
// Flow:    plan/schedules.h describes a step -> run() -> plan/forecast.h
// Threads: values
// Ranks:   no communication; no torch
//
// Time goes from event to event (an activity begins or ends). Between two events every activity works at a constant speed.
// The resource with the least for each of its users is divided first, evenly; what those users leave of other resources goes
// to the others there (max-min fairness, which TCP's flows and a kernel's run queue come near to). No formula speaks of
// queues, incast or waiting for the slowest: they follow.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace lockstep::plan {

// While n activities use it, all of them together get speed[n-1] units per second; beyond the last entry, the last one.
struct Resource {
  std::string name;
  std::vector<double> speed;
};

// Lets activities begin where more is needed than that others have ended. What comes to it waits until it may pass.
class Gate {
 public:
  virtual ~Gate() = default;
  virtual void come(int ticket) = 0;  // the ticket says who wants what
  virtual bool may_pass(int ticket) const = 0;
  virtual void pass(int ticket) = 0;
};
using MakeGate = std::function<std::unique_ptr<Gate>()>;

struct Activity {
  std::string name;
  int actor = -1;            // whose it is: a row of the timeline; -1: of none
  double delay = 0;          // seconds before its work, that need nothing of the resources
  double work = 0;           // units; each of `uses` does all of them
  std::vector<int> uses{};   // resources; none: its work takes no time
  std::vector<int> after{};  // activities that have to end before it begins
  int gate = -1;             // that it passes before it begins; -1: none
  int ticket = 0;            // for the gate
};

struct Times {
  double begin = 0;
  double end = 0;
};

struct Outcome {
  std::vector<Times> activities;  // seconds from the start, in the order of add()
  double end = 0;
};

class Simulation {
 public:
  int add(Resource resource);
  int add(Activity activity);
  int add(MakeGate gate);  // one for each run()

  const std::vector<Activity>& activities() const { return activities_; }

  // Throws UsageError: activities that wait for each other, or take less than nothing or for ever; a resource without speed.
  Outcome run() const;

 private:
  std::vector<Resource> resources_;
  std::vector<Activity> activities_;
  std::vector<MakeGate> gates_;
};

}  // namespace lockstep::plan
