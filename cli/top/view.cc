// SPDX-License-Identifier: Apache-2.0
#include "cli/top/view.h"

#include <algorithm>
#include <chrono>

namespace lockstep::top {
namespace {

constexpr double kNs = 1e-9;

PhaseSums difference(const PhaseSums& now, const PhaseSums& before) {
  PhaseSums result{};
  for (std::size_t i = 0; i < kPhases; ++i) result[i] = std::max<std::int64_t>(0, now[i] - before[i]);
  return result;
}

double& share_of(Shares& shares, Phase phase) {
  switch (phase) {
    case Phase::kOwnCode:
    case Phase::kForward:
    case Phase::kBackward: return shares.compute;
    case Phase::kLoading: return shares.data;
    case Phase::kExchange: return shares.exchange;
    case Phase::kUpdate: return shares.update;
    default: return shares.other;
  }
}

// The rank goes on while it is looked at, so that the parts may sum up to a little more or less than the time.
Shares shares_between(const RankLook& before, const RankLook& now) {
  const PhaseSums in_phase = difference(now.in_phase, before.in_phase), waited = difference(now.waited, before.waited);
  Shares shares;
  double all = 0;
  for (std::size_t i = 0; i < kPhases; ++i) {
    const std::int64_t waits = std::min(waited[i], in_phase[i]);
    shares.wait += static_cast<double>(waits);
    share_of(shares, static_cast<Phase>(i)) += static_cast<double>(in_phase[i] - waits);
    all += static_cast<double>(in_phase[i]);
  }
  const auto own_code = static_cast<std::size_t>(Phase::kOwnCode);
  shares.own_code = static_cast<double>(in_phase[own_code] - std::min(waited[own_code], in_phase[own_code]));
  for (double Shares::*part : {&Shares::compute, &Shares::own_code, &Shares::wait, &Shares::exchange, &Shares::data,
                               &Shares::update, &Shares::other})
    shares.*part /= std::max(all, 1.0);
  return shares;
}

ServerView server_between(const ServerLook& before, const ServerLook& now, double seconds) {
  const auto requests = static_cast<double>(now.requests - before.requests);
  const auto in_hand = static_cast<double>(now.ns_in_hand - before.ns_in_hand) * kNs;
  const auto gradients = static_cast<double>(now.gradients - before.gradients);
  return {.clients = now.clients,
          .queue = seconds > 0 && requests > 0 ? in_hand / seconds : now.in_hand,
          .requests = seconds > 0 ? requests / seconds : 0,
          .ms = requests > 0 ? in_hand / requests * 1000 : 0,
          .mean_delay = gradients > 0 ? static_cast<double>(now.delays - before.delays) / gradients : 0,
          .most_delay = now.most_delay};
}

double seconds_since_progress(const RankLook& now, bool moved, double seconds) {
  const double in_phase = now.phase_since == 0 ? 0 : static_cast<double>(now.at - now.phase_since) * kNs;
  return std::max(0.0, moved ? std::min(in_phase, seconds) : in_phase);
}

RankView rank_between(const RankLook& before, const RankLook& now) {
  RankView view{.now = now};
  const double seconds = static_cast<double>(now.at - before.at) * kNs;
  view.moved = now.moves != before.moves;
  view.steps_per_second = static_cast<double>(now.step - before.step) / seconds;
  view.samples_per_second = static_cast<double>(now.samples - before.samples) / seconds;
  view.shares = shares_between(before, now);
  view.without_core =
      std::clamp(static_cast<double>(now.ns_without_core - before.ns_without_core) * kNs / seconds, 0.0, 1.0);
  view.seconds_since_progress = seconds_since_progress(now, view.moved, seconds);
  if (now.server.clients > 0) view.server = server_between(before.server, now.server, seconds);
  return view;
}

RankView rank_at_first(const RankLook& now) {
  RankView view{.now = now, .moved = true};
  view.seconds_since_progress = seconds_since_progress(now, false, 0);
  if (now.server.clients > 0) view.server = server_between(now.server, now.server, 0);
  return view;
}

// The same process at the look before.
const RankLook* look_before(const JobLook& before, const RankLook& now) {
  const auto found =
      std::ranges::find_if(before.ranks, [&](const RankLook& each) { return each.pid == now.pid && each.at < now.at; });
  return now.pid == 0 || found == before.ranks.end() ? nullptr : &*found;
}

std::int64_t waited_for(const RankLook& look, int pid) {
  const auto found = look.waited_for.find(pid);
  return found == look.waited_for.end() ? 0 : found->second;
}

// How much of the others' time they waited for each rank.
void add_awaited(JobView& view, const JobLook& before) {
  for (RankView& awaited : view.ranks) {
    int others = 0;
    double sum = 0;
    for (const RankView& other : view.ranks) {
      const RankLook* const then = look_before(before, other.now);
      if (&other == &awaited || !other.is_worker() || then == nullptr) continue;
      ++others;
      const std::int64_t waits = waited_for(other.now, awaited.now.pid) - waited_for(*then, awaited.now.pid);
      sum += std::clamp(static_cast<double>(waits) / static_cast<double>(other.now.at - then->at), 0.0, 1.0);
    }
    if (others > 0 && awaited.is_known()) awaited.awaited = sum / others;
  }
}

void name_whom_they_wait_for(JobView& view) {
  for (RankView& rank : view.ranks) {
    if (rank.now.wait_since == 0) continue;
    const auto peer = std::ranges::find_if(
        view.ranks, [&](const RankView& other) { return other.is_known() && other.now.pid == rank.now.waits_for; });
    if (peer != view.ranks.end()) rank.waits_for = peer->now.rank;
  }
}

}  // namespace

JobView view_of(const JobLook& before, const JobLook& now) {
  const std::int64_t clock = std::chrono::system_clock::now().time_since_epoch() / std::chrono::nanoseconds(1);
  JobView view{.job = now.job, .seconds = static_cast<double>(clock - now.job.started_at) * kNs};
  for (const RankLook& rank : now.ranks) {
    const RankLook* const then = look_before(before, rank);
    view.ranks.push_back(then == nullptr ? rank_at_first(rank) : rank_between(*then, rank));
    view.samples_per_second = std::max(view.samples_per_second, view.ranks.back().samples_per_second);
  }
  add_awaited(view, before);
  name_whom_they_wait_for(view);
  view.verdicts = verdicts_on(view);
  return view;
}

}  // namespace lockstep::top
