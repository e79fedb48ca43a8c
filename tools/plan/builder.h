// SPDX-License-Identifier: Apache-2.0
// tools/plan/builder.h: what the schedules of all strategies are made of: the cores and links of a target, and what its devices do
// one after the other.
//
// Flow:    Profile, Target, Choice -> Builder; tools/plan/schedules.cc and pipeline.cc add activities -> take() -> Schedule
// Threads: values
// Ranks:   no communication
#pragma once

#include "tools/plan/schedules.h"

namespace lockstep::plan {

// The actor of an activity on this machine that only waits for what is in its `after`.
constexpr int nobody_on(int machine) { return -1 - machine; }

// The profile, the target and the choice must outlive it.
class Builder {
 public:
  Builder(const Profile& measured, const Target& wanted, const Choice& chosen);

  const Profile& profile;
  const Target& target;
  const Choice& choice;
  int devices() const { return target.all_devices(); }
  int machines() const { return target.machines; }
  int machine_of(int actor) const { return actor < 0 ? -1 - actor : machine_of_[actor]; }
  StepTimes alone(double samples) const;  // of a device alone on its machine
  StepTimes times_of(int device) const;   // the same, for its part of a batch: some parts are larger by one
  int add_actor(const std::string& name, int machine);  // returns its number; the first ones are the devices

  // ---- An activity of `actor`, after what it did before and after `after`; returns its id

  int compute(int device, const std::string& name, double seconds, const Ids& after = {});  // forward or backward
  int touch(int actor, const std::string& name, double bytes, const Ids& after = {});       // read and written
  int update(int actor, double share, const Ids& after = {});  // that share of all parameters
  // Lets all of them go on when the last one is there.
  void meet(const Ids& actors, const Ids& after = {});

  // ---- An activity beside its actor, which does not wait for it: after `after` only

  // A message that was posted. After `left` its connection carries the next one. Inside a machine it is copied into shared
  // memory and out of it.
  struct Message {
    int left;
    int arrived;
  };
  Message post(int actor, int from, int to, const std::string& name, double bytes, const Ids& after);
  // A message of `bytes` from the actor's machine to each other one, and from each of them to it, and one of `to_next` to a single
  // one. Returns the last one's arrival.
  int exchange(int actor, double bytes, const Ids& after, double to_next = 0);
  int join(const Ids& after, double seconds = 0);  // once all of them have ended

  Ids last(int actor) const { return last_[actor]; }
  void follow(int actor, const Ids& activities) { last_[actor] = activities; }

  Ids all_devices() const { return consecutive(0, devices()); }
  Ids devices_on(int machine) const { return consecutive(machine * target.devices, target.devices); }

  // Computations of all devices.
  void forward();
  void backward();
  void forward_and_backward();
  void end_step();
  Schedule take();

 private:
  int work(int actor, const std::string& name, Kind kind, double seconds, const Ids& after);
  int handle_messages(int machine, double seconds, const Ids& after);
  void add_machine(int machine);
  double slowdown(int at_once) const;
  std::vector<double> speeds_of_cores() const;

  Schedule made_;
  IntVector<Ids> last_;  // of each actor: what its next activity waits for
  Ids machine_of_;       // each actor
  Ids out_, in_;         // the links of each machine
  Ids memory_;           // of each machine that has a memory_rate
  IntVector<double> sent_, received_;
  double latency_ = 0;  // seconds until a message without bytes arrives
  Line work_;           // of messages
  double copy_speed_;   // of a device
  int threads_ = 1;     // of a device
  int seats_ = 1;       // devices of a machine that can compute at the same time
};

// ---- What several strategies do, in tools/plan/schedules.cc

// Once all are there: each device that share of the parameters. On one machine.
void update_together(Builder& b, double share);
// Between machines, a few numbers of all devices, such as samples and loss.
void sum_up(Builder& b, double bytes);
// Between machines. docs/design/hierarchy.md: chunk by chunk, reduced inside each machine, exchanged in two rounds, shared. `actors`:
// one per machine; after[machine].
void all_reduce(Builder& b, const Ids& actors, double bytes, const IntVector<Ids>& after);

void pipeline(Builder& b);  // a step of one: tools/plan/pipeline.cc

// ---- The bytes that a message between machines puts on their links

struct MessageBytes {
  double there = 0;  // from the sender to the receiver
  double back = 0;
};
MessageBytes bytes_on_wire(double bytes);  // of a message of so many bytes

}  // namespace lockstep::plan
