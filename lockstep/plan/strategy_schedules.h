// SPDX-License-Identifier: Apache-2.0
// plan/strategy_schedules.h: one function for each strategy, which adds the activities of one step.
//
// Flow:    plan/schedules.cc chooses one -> Builder
// Threads: values
// Ranks:   no communication
#pragma once

#include "lockstep/plan/schedule_builder.h"

namespace lockstep::plan {

// ---- One machine: plan/one_machine.cc

void single(Builder& b);
void ddp_in_memory(Builder& b);
void towers(Builder& b);
void data_parallel(Builder& b);
void store_local(Builder& b);
void update_together(Builder& b, int sources);  // one pass over memory on the cores of all devices

// ---- Between machines: plan/between_machines.cc. `networks`: for each machine an actor that exchanges beside its devices.

void ddp_between_machines(Builder& b, const Ids& networks);
void averaging(Builder& b, const Ids& networks, int step);
void store_sync(Builder& b, const Ids& servers);  // an actor for each server
void store_async(Builder& b, const Ids& locks);   // of each server

void sum_up(Builder& b, double bytes);  // a few numbers of all devices, such as samples and loss

// ---- plan/pipeline.cc

void pipeline(Builder& b);

}  // namespace lockstep::plan
