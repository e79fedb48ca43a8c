// SPDX-License-Identifier: Apache-2.0
// tools/plan/strategy_schedules.h: strategies between machines, and pipelines: functions that add the activities of one step.
//
// Flow:    tools/plan/schedules.cc chooses one -> Builder
// Threads: values
// Ranks:   no communication
#pragma once

#include "tools/plan/builder.h"

namespace lockstep::plan {

// Once all are there: each device that share of the parameters. On one machine.
void update_together(Builder& b, double share);

// ---- Between machines: tools/plan/between_machines.cc. `networks`: for each machine an actor that exchanges beside its devices.

void ddp_between_machines(Builder& b, const Ids& networks);
void averaging(Builder& b, const Ids& networks, int step);
void store_sync(Builder& b, const Ids& servers);  // an actor for each server
void store_async(Builder& b);

void sum_up(Builder& b, double bytes);  // a few numbers of all devices, such as samples and loss

// docs/design/hierarchy.md: chunk by chunk, reduced inside each machine, exchanged in two rounds, shared. `actors`: one per
// machine; after[machine].
void all_reduce(Builder& b, const Ids& actors, double bytes, const IntVector<Ids>& after);

// ---- tools/plan/pipeline.cc

void pipeline(Builder& b);

}  // namespace lockstep::plan
