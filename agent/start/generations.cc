// SPDX-License-Identifier: Apache-2.0
#include "agent/start/generations.h"

#include <algorithm>

#include "agent/meet/machines.h"
#include "lockstep/base/log.h"
#include "lockstep/base/text.h"

namespace lockstep {
namespace {

constexpr milliseconds kLeavesWithin{500};  // a rank whose peers are gone

}  // namespace

Generations::Generations(const FailureOptions& options, Machines* machines, LocalRanks& ranks, Keeper* keeper)
    : options_(options), machines_(machines), ranks_(ranks), keeper_(keeper) {
  if (machines_) number_by(machines_->epoch());
}

void Generations::on_met(int seat, int generation) {
  LocalRank* const rank = ranks_.find(seat);
  if (rank != nullptr) rank->has_met = rank->has_met || generation == rank->generation;
}

void Generations::on_next(int seat, int generation) {
  LocalRank* const rank = ranks_.find(seat);
  if (rank == nullptr || rank->end) return;
  rank->waits = true;
  if (generation < ranks_.generation()) return ranks_.admit(*rank);
  if (!decides_at_) decides_at_ = Deadline::after(options_.grace);
}

// ---- One machine

bool Generations::go_on_after(LocalRank& failed) {
  if (keeper_ == nullptr) return false;
  if (can_replace(failed))
    replace(failed);
  else if (options_.min_ranks > 0 && ranks_.count_alive() >= options_.min_ranks)
    go_on_without(failed);
  else
    return false;
  return true;
}

// One that belongs to an earlier generation has been lost with it.
bool Generations::can_replace(const LocalRank& rank) const {
  if (machines_ && machines_->end()) return false;
  return restarts_ < options_.max_restarts || (restarts_ > 0 && rank.generation < ranks_.generation());
}

void Generations::replace(LocalRank& rank) {
  const bool is_first = rank.generation == ranks_.generation();  // of this generation that is lost
  if (machines_ && is_first) return machines_->want_restart();
  if (is_first) ++restarts_;
  log_warning(concat("rank ", rank.rank, " ", how_it_ended(*rank.end), "; a new process takes its place (restart ",
                     restarts_, " of ", options_.max_restarts, ")"));
  if (is_first) begin();
  ranks_.restart(rank);
}

void Generations::go_on_without(LocalRank& rank) {
  rank.is_gone = true;
  log_warning(concat("rank ", rank.rank, " ", how_it_ended(*rank.end), "; the job goes on with ", ranks_.count_alive(),
                     " ranks"));
  begin();
}

void Generations::rejoin(LocalRank& finished) {
  if (finished.generation < ranks_.generation()) ranks_.restart(finished);
}

// Those that are about to meet in the generation before would wait for the rank that is lost. Those that have ended well
// are missed by the others: started again, they find that all is done. Of those that have failed, each gets its own turn.
void Generations::begin() {
  ranks_.begin_generation(ranks_.generation() + 1);
  decides_at_.reset();
  for (LocalRank& rank : ranks_) {
    if (rank.is_gone) continue;
    const bool has_failed = rank.end && rank.end->failed();
    if (rank.waits)
      ranks_.admit(rank);
    else if (!has_failed && (rank.end || !rank.has_met))
      ranks_.restart(rank);
  }
}

void Generations::decide_without_a_loss() {
  const auto waits = [](const LocalRank& rank) { return rank.waits || rank.end; };
  const bool all_wait = !machines_ && std::ranges::all_of(ranks_, waits);  // else it may be another machine
  if (!decides_at_ || (!all_wait && !decides_at_->passed())) return;
  decides_at_.reset();
  for (const LocalRank& rank : ranks_) {
    if (waits(rank)) continue;
    log_warning(concat("rank ", rank.rank, " is killed: others have waited for it for longer than their timeout"));
    rank.process->signal_group(SIGKILL);
  }
  if (machines_ && restarts_ == options_.max_restarts)
    return machines_->end_job("the ranks have lost each other, and no restart is left");
  if (machines_) return machines_->want_restart();
  if (!all_wait || restarts_ == options_.max_restarts) return;
  ++restarts_;
  log_warning(
      concat("the ranks have lost each other; they go on (restart ", restarts_, " of ", options_.max_restarts, ")"));
  begin();
}

// ---- Several machines: an epoch of the machines is a generation of the ranks

void Generations::follow_epochs() {
  if (const auto epoch = machines_->take_news()) begin_as(*epoch);
  if (leave_by_ && leave_by_->passed()) replace_those_that_stay();
}

void Generations::number_by(const Epoch& epoch) {
  members_ = epoch.members;
  restarts_ = epoch.restarts;
  ranks_.begin_generation(epoch.number, place_of(epoch, machines_->me().id));
}

// Gives the last rank up if machines have only come: a rank comes by itself only where it has lost a peer.
void Generations::begin_as(const Epoch& epoch) {
  const auto is_still_there = [&](const Member& member) { return epoch.has(member.id); };
  const bool is_lost = epoch.restarts != restarts_ || !std::ranges::all_of(members_, is_still_there);
  const bool has_last = members_.back().id == machines_->me().id;
  decides_at_.reset();
  if (keeper_ != nullptr) keeper_->read_all();
  number_by(epoch);
  log_warning(concat("generation ", epoch.number, ": ", epoch.members.size(), " machines, ", epoch.world_size(),
                     " ranks (restart ", restarts_, " of ", options_.max_restarts, "); this one is machine ",
                     machines_->node_rank()));
  for (LocalRank& rank : ranks_) {
    const bool is_given_up = !is_lost && has_last && &rank == &*std::prev(ranks_.end());
    if (rank.waits)
      ranks_.admit(rank);
    else if (rank.end || !rank.has_met || is_given_up)
      ranks_.restart(rank);
  }
  leave_by_ = Deadline::after(kLeavesWithin);
}

// In a collective with a machine that says nothing any more, or in one that does not need those that are lost.
void Generations::replace_those_that_stay() {
  leave_by_.reset();
  for (LocalRank& rank : ranks_)
    if (rank.generation < ranks_.generation()) ranks_.restart(rank);
}

}  // namespace lockstep
