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

#include "lockstep/base/to_size.h"
#include "lockstep/plan/schedules.h"

namespace lockstep::plan {

using Ids = std::vector<int>;  // of activities or actors

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
  int add_lock();                          // of a server
  int add_gate(MakeGate make) { return made_.simulation.add(std::move(make)); }

  // ---- An activity of `actor`, after what it did before and after `after`; returns its id

  int compute(int device, const std::string& name, double seconds, const Ids& after = {});  // forward or backward
  int process(int actor, int machine, const std::string& name, double seconds, const Ids& after = {});  // on one core
  int touch(int actor, int machine, const std::string& name, double bytes, const Ids& after = {});  // read and written
  // That share of an update of all parameters, which adds up the gradients of so many sources in the same pass.
  int update(int actor, int machine, double share, int sources = 1, const Ids& after = {});
  int pass_gate(int actor, int gate, int ticket, const Ids& after = {});  // waits there, and takes no time
  // All of them go on when the last one is there.
  int meet(const Ids& actors, double seconds, const Ids& after = {});

  // ---- What goes on beside its actor, which does not wait for it: after `after` only

  // A message that was posted. After `left` its connection carries the next one. Inside a machine it is copied into shared
  // memory and out of it.
  struct Message {
    int left;
    int arrived;
  };
  // Gloo sends what was asked for: ends once the sender has heard that the receiver, ready after `after`, wants what comes next.
  // post() counts the bytes of that.
  int ask(int receiver, int sender, const Ids& after) {
    return receiver == sender ? join(after) : join(after, target_.link_latency + profile_.message);
  }
  Message post(int actor, int from, int to, const std::string& name, double bytes, const Ids& after);
  // Messages of these sizes from this machine to each other one, and from each of them to it. Returns the last one's arrival.
  int exchange(int actor, int machine, const std::string& name, const std::vector<double>& sizes, const Ids& after);
  int start_exchange(int machine, const Ids& after);      // what comes before the first of several
  int pass(int machine, double bytes, const Ids& after);  // over memory
  // By one holder of the lock at a time.
  int pass_locked(int lock, int machine, double bytes, const Ids& after);
  int update_locked(int lock, int machine, double share, const Ids& after);
  int join(const Ids& after, double seconds = 0);  // once all of them have ended

  Ids last(int actor) const { return last_[to_size(actor)]; }
  void follow(int actor, const Ids& activities) { last_[to_size(actor)] = activities; }

  Ids all_devices() const;
  Ids devices_on(int machine) const;

  // ---- What several strategies do

  // A barrier of the devices of a machine; ranks without a core of their own wait for the kernel to switch to them.
  double barrier() const {
    if (target_.devices == 1) return 0;
    return target_.devices > seats_ ? profile_.crowded_barrier : profile_.barrier;
  }
  double handover() const { return target_.devices > seats_ ? profile_.crowded_handover : profile_.handover; }

  void forward_and_backward(int device);
  void end_step();
  Schedule take();

 private:
  Activity passing(int machine, const std::string& name, double bytes, const Ids& after) const;
  Activity updating(int machine, double share, int sources, const Ids& after) const;
  int add(int actor, Activity activity);
  int beside(int actor, Activity activity);
  // What cores do for messages: the system's calls, encryption, waking threads.
  struct Messages {
    double seconds = 0;  // of a core, without what their bytes take
    double bytes = 0;
    double on_wire = 0;  // bytes with headers, at one end of a link
  };
  int handle(int machine, bool is_worker, const Messages& what, const Ids& after);
  void add_machine(int machine);
  void add_seats();
  Activity on_seat(int actor, Activity activity) const;
  double slowdown(int at_once, double (*part)(const StepTimes&)) const;
  std::vector<double> speeds(int most, double (*part)(const StepTimes&)) const;
  std::vector<double> speeds_of_cores() const;
  std::vector<double> speeds_of_updates() const;
  std::vector<double> speeds_of_copies() const;
  double luck(int device) const;

  const Profile& profile_;
  const Target& target_;
  const Choice& choice_;
  Luck luck_;
  Schedule made_;
  std::vector<Ids> last_;  // of each actor: what its next activity waits for
  Ids out_, in_;           // of each machine
  Ids seats_of_devices_;   // the core, or cores, to which each is bound
  std::vector<double> sent_, received_;
  double round_ = 0;  // seconds of an exchange without bytes, beside the link's
  WorkOfMessages work_;
  int threads_ = 1;  // of a device
  int seats_ = 1;    // devices of a machine that can compute at the same time
};

}  // namespace lockstep::plan
