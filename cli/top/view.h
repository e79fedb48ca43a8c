// SPDX-License-Identifier: Apache-2.0
// cli/top/view.h: what the ranks of a job did between two looks, and what holds them up.
//
// Flow:    two looks of cli/top/jobs.h -> here -> cli/top/layout.h, cli/top/json.h
// Threads: pure functions
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "cli/top/jobs.h"

namespace lockstep::top {

// Parts of the time between two looks, from 0 to 1.
struct Shares {
  double compute = 0;   // forward, backward and own code
  double own_code = 0;  // of that: what a program does between them, such as loading without our Loader
  double wait = 0;      // for other ranks of this machine, in whatever phase
  double exchange = 0;  // of gradients, without that
  double data = 0;      // waiting for the next batch
  double update = 0;    // of parameters, without waiting for other ranks
  double other = 0;     // starting, meeting, validating, saving
};

struct ServerView {
  int clients = 0;
  double queue = 0;             // requests in hand, on average
  double requests = 0;          // a second
  double ms = 0;                // of a request, on average
  double mean_delay = 0;        // updates made elsewhere between a worker's reading and its gradient
  std::int64_t most_delay = 0;  // since the start
};

struct RankView {
  RankLook now;
  bool moved = false;  // between the looks
  double steps_per_second = 0;
  double samples_per_second = 0;
  Shares shares;
  double awaited = 0;       // part of the time of the others (which are no servers) in which they wait for this rank
  double without_core = 0;  // part of the time in which its main thread wanted to run and was not let
  double seconds_since_progress = 0;
  std::optional<int> waits_for{};  // rank
  std::optional<ServerView> server{};

  bool is_known() const { return now.pid != 0; }
  bool lives() const { return is_known() && now.state != 0 && now.phase != Phase::kEnded; }
  bool is_worker() const { return lives() && !server; }
};

struct Verdict {
  std::string
      kind;  // stopped, died, circle, stuck, meeting, data, straggler, server, cores, exchange, fine, starting, ended
  std::vector<int> ranks;
  std::string text;
};

struct JobView {
  Job job;
  double seconds = 0;  // since it was started
  double samples_per_second = 0;
  std::vector<RankView> ranks{};
  std::vector<Verdict> verdicts{};  // the worst first; never empty
};

// `before` may lack ranks, or the whole job: then there are no rates yet.
JobView view_of(const JobLook& before, const JobLook& now);

// ---- cli/top/verdict.cc

std::vector<Verdict> verdicts_on(const JobView& job);

}  // namespace lockstep::top
