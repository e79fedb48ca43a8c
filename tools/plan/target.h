// SPDX-License-Identifier: Apache-2.0
// tools/plan/target.h: what a forecast is for: the machines, the links between them, the batch; and the choices there are.
//
// Threads: values
// Ranks:   no communication
#pragma once

#include "lockstep/strategy.h"

namespace lockstep::plan {

struct Target {
  int machines = 1;
  int devices = 1;             // of each machine
  int cores = 0;               // of each machine; 0: as many as the machine of the profile
  double link_rate = 1e9 / 8;  // bytes per second, in each direction
  double link_latency = 1e-4;  // seconds, one way
  int64_t batch = 1;           // samples of a step, over all devices
  int servers = 0;             // of the parameter server, on the machines in turn; 0: several numbers are compared
  int64_t epochs = 1;
  AveragingOptions averaging{};  // but for `every`, of which several are compared
  double memory_rate = 0;        // bytes per second for all cores of a machine; 0: not known

  int all_devices() const { return machines * devices; }
};

constexpr int kMostDevices = 65536;  // of a target: no forecast is known to be right for more

// Throws UsageError: no device, too many, or one without a sample.
void require_possible(const Target& target);

// A way to train, and its options; the others do not matter.
struct Choice {
  using enum StrategyKind;
  StrategyKind kind = kDdp;
  KVStoreKind store = KVStoreKind::kLocal;           // kvstore
  bool update_on_cpu = false;                        // towers
  AveragingOptions averaging{};                      // averaging
  int servers = 1;                                   // kvstore dist_*
  PipelineSchedule order = PipelineSchedule::k1F1B;  // pipeline
  int stages = 1;                                    // pipeline
  int micro_batches = 4;                             // pipeline, unless naive

  std::string name() const;                               // "pipeline gpipe, 2 x 4"
  std::string arguments(int ranks) const;                 // of lockstep train: "--strategy pipeline --ranks 2 ..."
  StrategyOptions options(StrategyOptions others) const;  // `others`: with this choice in it
  Target on(Target target) const;                         // single: one device with all cores of a machine
  bool exact() const;               // the same result as on one device: neither stale nor averaged later
  bool has_device_threads() const;  // the devices of a machine are threads of one process
  bool has_servers() const { return store != KVStoreKind::kLocal; }
  int parts_of_batch() const { return order == PipelineSchedule::kNaive ? 1 : micro_batches; }  // pipeline
};

// Every choice that the target allows. pieces: into which the model can be cut; 0: it can't be.
std::vector<Choice> choices_for(const Target& target, int pieces);

}  // namespace lockstep::plan
