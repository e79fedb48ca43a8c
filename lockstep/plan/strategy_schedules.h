// SPDX-License-Identifier: Apache-2.0
// plan/strategy_schedules.h: one function for each strategy, which adds the activities of one step.
//
// Flow:    plan/schedules.cc chooses one -> Builder
// Threads: values
// Ranks:   no communication
#pragma once

#include <functional>
#include <vector>

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
void ddp_compressed(Builder& b, const Ids& networks);  // plan/compressed_ddp.cc
void averaging(Builder& b, const Ids& networks, int step);
void store_sync(Builder& b, const Ids& servers);  // an actor for each server
void store_async(Builder& b, const Ids& locks);   // of each server

void sum_up(Builder& b, double bytes);  // a few numbers of all devices, such as samples and loss

// ---- What they are made of

struct FullBucket {
  double bytes = 0;
  std::size_t module = 0;  // after whose backward it is full
};

std::vector<FullBucket> buckets_of(const Profile& profile, double limit);  // the last parameters first
void forward_and_totals(Builder& b, const Ids& networks);                  // and the number of samples of all

// Backward of all devices, module by module; when_full() adds what a device does as soon as a bucket is full.
void backward_into_buckets(Builder& b, const std::vector<FullBucket>& buckets,
                           const std::function<void(const FullBucket&)>& when_full);

std::vector<Ids> last_of_machines(const Builder& b);  // [machine] what its devices have done so far

// docs/design/hierarchy.md: chunk by chunk, reduced inside each machine, exchanged in two rounds, shared. `actors`: one per
// machine; after[machine].
void all_reduce(Builder& b, const Ids& actors, double bytes, const std::vector<Ids>& after);

void update_on_machines(Builder& b, const std::vector<Ids>& after);  // after[machine]; each device updates its slice

// What a worker does with servers that update with each gradient as it comes. Each call returns when it is done there; `after`
// is waited for beside what the worker did before.
class AsyncStore {
 public:
  AsyncStore(Builder& builder, const Ids& locks);
  int servers() const { return static_cast<int>(locks_.size()); }
  int push(int device, int server, const Ids& after = {});
  int update(int device, int server, const Ids& after);  // until the worker has heard of it
  int ask(int device, int server, const Ids& after);
  int pull(int device, int server, const Ids& asked, const Ids& ready);  // ready: the worker for the reply
  void unpack(int device, const Ids& after);

 private:
  int home(int server) const { return server % b_.machines(); }
  double size(int server) const { return sizes_[to_size(server)]; }

  Builder& b_;
  Ids locks_;                  // of the servers
  std::vector<double> sizes_;  // bytes of their keys
};

// ---- dist_bounded: plan/bounded_store.cc

int add_staleness_gate(Builder& b);
void store_bounded(Builder& b, const Ids& locks, int gate, int step);
void leave_bounded_store(Builder& b, int gate);  // after the last step: workers that are done hold no one up

// ---- plan/pipeline.cc

void pipeline(Builder& b);

}  // namespace lockstep::plan
