// SPDX-License-Identifier: Apache-2.0
#include "tools/plan/schedules.h"

#include "lockstep/base/text.h"
#include "tools/plan/strategy_schedules.h"

namespace lockstep::plan {
namespace {

void require_fitting(const Profile& profile, const Target& target, const Choice& choice) {
  using enum StrategyKind;
  const bool one_process =
      choice.kind == kTowers || choice.kind == kDataParallel || (choice.kind == kKVStore && !choice.has_servers());
  const bool one_machine = one_process && target.machines > 1, one_device = choice.kind == kSingle;
  const bool stages_fit = choice.stages == target.all_devices() && choice.stages <= std::ssize(profile.pieces);
  if (one_machine) throw UsageError({.what = concat(choice.name(), ": its devices are threads of one process")});
  if (one_device && target.all_devices() > 1) throw UsageError({.what = "single: it trains on one device"});
  if (choice.kind == kPipeline && (!stages_fit || choice.parts_of_batch() > target.batch))
    throw UsageError({.what = concat(choice.name(), " on ", target.all_devices(), " devices"),
                      .here = concat("the model has ", profile.pieces.size(), " pieces, the batch ", target.batch),
                      .next = "give each device a stage of at least one piece, and each micro-batch a sample"});
}

// docs/design/fused-step.md: publish, agree, each rank updates its slice from all gradients.
void ddp_in_memory(Builder& b) {
  b.forward_and_backward();
  update_together(b, 1.0 / b.devices());
}

// Threads: after each part the scheduling thread hears of all devices and gives them the next.
void devices_with_one_update(Builder& b) {
  b.forward();
  b.meet(b.all_devices());
  b.backward();
  update_together(b, 1.0 / b.devices());
}

// Each device reads its part of all gradients, writes their sum to all, and updates its own replica.
void towers(Builder& b) {
  if (b.choice.update_on_cpu) return devices_with_one_update(b);
  b.forward_and_backward();
  b.meet(b.all_devices());
  for (const int device : b.all_devices()) b.touch(device, "all_reduce", 2 * b.profile.parameter_bytes);
  update_together(b, 1);
}

void kvstore(Builder& b, const Ids& servers) {
  if (!b.choice.has_servers()) return devices_with_one_update(b);
  b.choice.store == KVStoreKind::kDistSync ? store_sync(b, servers) : store_async(b);
}

}  // namespace

void update_together(Builder& b, double share) {
  b.meet(b.all_devices());
  for (const int device : b.all_devices()) b.update(device, share);
  b.meet(b.all_devices());
}

Schedule schedule(const Profile& profile, const Target& wanted, const Choice& choice, int steps) {
  const Target target = choice.on(wanted);
  require_possible(target);
  require_fitting(profile, target, choice);
  Builder b(profile, target, choice);
  Ids networks, servers;
  if (target.machines > 1)
    for (int m = 0; m < target.machines; ++m) networks.push_back(b.add_actor(concat("network of machine ", m), m));
  if (choice.store == KVStoreKind::kDistSync)
    for (int s = 0; s < choice.servers; ++s) servers.push_back(b.add_actor(concat("server ", s), s % target.machines));
  for (int step = 0; step < steps; ++step) {
    switch (choice.kind) {
      using enum StrategyKind;
      case kSingle:
      case kDdp: target.machines == 1 ? ddp_in_memory(b) : ddp_between_machines(b, networks); break;
      case kTowers: towers(b); break;
      case kDataParallel: devices_with_one_update(b); break;
      case kKVStore: kvstore(b, servers); break;
      case kAveraging: averaging(b, networks, step); break;
      case kPipeline: pipeline(b); break;
    }
    b.end_step();
  }
  return b.take();
}

}  // namespace lockstep::plan
