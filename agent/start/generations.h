// SPDX-License-Identifier: Apache-2.0
// agent/start/generations.h: how a job goes on after a loss. On one machine that is decided here: a new process takes the place of
// the lost rank, or the others go on without it. On several machines the launchers agree on an epoch, which is followed.
//
// Flow:    ends of ranks, their words to the keeper, epochs of machines.h -> here -> local_ranks.h
// Owns:    the number of restarts
// Threads: the launcher's only one
//
// docs/design/recovery.md; agent/recover/recovery.pml is a model of it.
#pragma once

#include <optional>
#include <vector>

#include "agent/start/launcher.h"
#include "agent/start/local_ranks.h"
#include "lockstep/deadline.h"

namespace lockstep {

class Generations {
 public:
  // machines: null where they do not number themselves; keeper: where a loss ends the job.
  Generations(const FailureOptions& options, Machines* machines, LocalRanks& ranks, Keeper* keeper);

  int restarts() const { return restarts_; }

  // Called with what the keeper hears of a rank.
  void on_met(int seat, int generation);
  void on_next(int seat, int generation);  // it has lost another one, whose end may not be known yet

  bool go_on_after(LocalRank& failed);  // false: no restart is left, the job has to end
  void rejoin(LocalRank& finished);     // it has ended well, but the others have begun anew and miss it

  // Ranks have lost others, but none has ended: they have waited for longer than their timeout. Those that do not answer
  // until then are killed, and replaced when they have ended.
  const std::optional<Deadline>& decides_at() const { return decides_at_; }
  void decide_without_a_loss();

  void follow_epochs();  // of several machines

 private:
  bool can_replace(const LocalRank& rank) const;
  void replace(LocalRank& rank);
  void go_on_without(LocalRank& rank);
  void begin();
  void number_by(const Epoch& epoch);
  void begin_as(const Epoch& epoch);
  void replace_those_that_stay();

  const FailureOptions& options_;
  Machines* machines_;
  LocalRanks& ranks_;
  Keeper* keeper_;
  int restarts_ = 0;
  std::optional<Deadline> decides_at_{};
  std::vector<Member> members_{};       // of this generation's epoch, on several machines
  std::optional<Deadline> leave_by_{};  // ranks of the generation before
};

}  // namespace lockstep
