// SPDX-License-Identifier: Apache-2.0
// train/reports/run_facts.h: what the metrics say of a run beside its steps: how it was started, where it ran, and what each rank
// took. `lockstep report` shows them.
//
// Flow:    options, /proc, the ranks -> here -> train/reports/metrics.h
// Threads: any
#pragma once

#include <string>

#include "lockstep/strategy.h"
#include "lockstep/train/options/options.h"
#include "lockstep/train/reports/metrics.h"
#include "lockstep/world.h"

namespace lockstep {

inline constexpr int kMetricsFormat = 1;  // raised when a reader of the old one would misunderstand the new one

// The arguments as a shell takes them: `program --data "a b"` with single quotes where they are needed.
std::string command_of(int argc, const char* const* argv);

// The first event of a run, and of each time that it is resumed: format, next step, command, launcher, machine (name,
// processor, cores, memory), all settings.
Json start_event(const TrainOptions& options, std::int64_t step);

// Seconds of each phase, and of waiting for data, added up over the steps; memory of the process at the end of the run:
// its share of what it has in memory (PSS), and the most it has had, with all that it shares.
// Ranks:  all of `together` call it. Blocks.
Json facts_of_each_rank(const World& together, const World& world, const PhaseTimes& phases, double data_seconds);

}  // namespace lockstep
