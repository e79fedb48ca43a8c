// SPDX-License-Identifier: Apache-2.0
// plan/schedule_builder.h: what the schedules of all strategies are made of: the cores, memory and links of a target, and what
// its devices do one after the other.
//
// Flow:    Profile, Target, Choice -> Builder; plan/strategy_schedules.h adds activities -> take() -> Schedule
// Threads: values
// Ranks:   no communication
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/plan/schedules.h"

namespace lockstep::plan {

using Ids = std::vector<int>;  // of activities or actors

inline std::size_t at(int index) { return static_cast<std::size_t>(index); }

// The profile, the target and the choice must outlive it.
class Builder {
 public:
  Builder(const Profile& profile, const Target& target, const Choice& choice, Luck luck);

  const Profile& profile() const { return profile_; }
  const Target& target() const { return target_; }
  const Choice& choice() const { return choice_; }
  int devices() const { return target_.all_devices(); }
  int machines() const { return target_.machines; }
  int machine_of(int device) const { return device / target_.devices; }
  double parameter_bytes() const { return static_cast<double>(profile_.parameter_bytes); }
  double samples_of(int device) const;     // as lockstep's sampler cuts a batch: the first parts are larger by one
  StepTimes alone(double samples) const;   // of a device alone on its machine
  int add_actor(const std::string& name);  // returns its number; the first ones are the devices

  // ---- An activity of `actor`, after what it did before and after `after`; returns its id

  int compute(int actor, int machine, const std::string& name, double seconds, const Ids& after = {});
  int touch(int actor, int machine, const std::string& name, double bytes, const Ids& after = {});  // read and written
  // A message. Inside a machine it is copied into shared memory and out of it.
  int send(int actor, int from, int to, const std::string& name, double bytes, const Ids& after = {});
  // As much from this machine to all others as from them to it.
  int exchange(int actor, int machine, const std::string& name, double bytes, const Ids& after = {});
  // All of them go on when the last one is there.
  int meet(const Ids& actors, double seconds, const Ids& after = {});

  Ids last(int actor) const { return last_[at(actor)]; }
  void follow(int actor, const Ids& activities) { last_[at(actor)] = activities; }

  Ids all_devices() const;
  Ids devices_on(int machine) const;

  // ---- What several strategies do

  // A barrier of the devices of a machine; ranks without a core of their own wait for the kernel to switch to them.
  double barrier() const { return target_.devices > seats_ ? profile_.crowded_barrier : profile_.barrier; }
  double handover() const { return target_.devices > seats_ ? profile_.crowded_handover : profile_.handover; }

  // Bytes that reducing `sources` gradients and updating touch: all gradients once, parameters and state in and out. In the
  // unit that makes the measured update of one source take as long as it did.
  double update_bytes(int sources) const;

  // What comes to the gate waits there; an activity that takes no time.
  int add_gate(MakeGate make) { return made_.simulation.add(std::move(make)); }
  int pass(int actor, int gate, int ticket, const Ids& after = {});

  void forward_and_backward(int device);
  void end_step();
  Schedule take();

 private:
  int add(int actor, Activity activity);
  void add_machine(int machine);
  std::vector<double> core_speeds() const;
  double luck(int device) const;

  const Profile& profile_;
  const Target& target_;
  const Choice& choice_;
  Luck luck_;
  Schedule made_;
  std::vector<Ids> last_;  // of each actor: what its next activity waits for
  Ids out_, in_, wire_;    // of each machine
  std::vector<double> sent_, received_;
  double message_ = 0;  // seconds of a message, beside the link's
  int threads_ = 1;     // of a device
  int seats_ = 1;       // devices of a machine that can compute at the same time
};

}  // namespace lockstep::plan
