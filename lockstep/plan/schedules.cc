// SPDX-License-Identifier: Apache-2.0
#include "lockstep/plan/schedules.h"

#include "lockstep/base/text.h"
#include "lockstep/error.h"
#include "lockstep/plan/strategy_schedules.h"

namespace lockstep::plan {
namespace {

void require_fitting(const Profile& profile, const Target& target, const Choice& choice) {
  const auto require = [&](bool good, const std::string& what) {
    if (!good) throw UsageError({.what = concat(choice.name(), ": ", what)});
  };
  const bool one_process = choice.method == Method::kTowers || choice.method == Method::kDataParallel ||
                           choice.method == Method::kStoreLocal;
  require(choice.method != Method::kSingle || target.all_devices() == 1, "it trains on one device");
  require(choice.compression == Compression::kNone || target.machines > 1,
          "ranks of one machine send nothing that could be compressed");
  require(choice.compression == Compression::kNone || choice.method == Method::kDdp ||
              (choice.method == Method::kStoreSync && choice.compression == Compression::kTwoBit),
          "a forecast knows compression of ddp, and two bits of kvstore dist_sync");
  require(!one_process || target.machines == 1, "its devices are threads of one process, on one machine");
  if (choice.method != Method::kPipeline) return;
  require(choice.stages == target.all_devices(), "a forecast has a stage for each device");
  require(choice.stages <= std::ssize(profile.pieces),
          concat("the model has ", profile.pieces.size(), " pieces, too few for ", choice.stages, " stages"));
  require(choice.order == PipelineSchedule::kNaive || choice.micro_batches <= target.batch,
          "more micro-batches than samples");
}

void ddp(Builder& b, const Ids& networks) {
  if (b.machines() == 1) return ddp_in_memory(b);
  b.choice().compression == Compression::kNone ? ddp_between_machines(b, networks) : ddp_compressed(b, networks);
}

}  // namespace

Schedule schedule(const Profile& profile, const Target& target, const Choice& choice, int steps, Luck luck) {
  require_possible(target);
  require_fitting(profile, target, choice);
  Builder b(profile, target, choice, luck);
  Ids networks, servers, locks;
  if (target.machines > 1)
    for (int m = 0; m < target.machines; ++m) networks.push_back(b.add_actor(concat("network of machine ", m)));
  if (choice.method == Method::kStoreSync)
    for (int s = 0; s < choice.servers; ++s) servers.push_back(b.add_actor(concat("server ", s)));
  if (choice.method == Method::kStoreAsync || choice.method == Method::kStoreBounded)
    for (int s = 0; s < choice.servers; ++s) locks.push_back(b.add_lock());
  const int gate = choice.method == Method::kStoreBounded ? add_staleness_gate(b) : -1;
  for (int step = 0; step < steps; ++step) {
    switch (choice.method) {
      case Method::kSingle: single(b); break;
      case Method::kDdp: ddp(b, networks); break;
      case Method::kTowers: towers(b); break;
      case Method::kDataParallel: data_parallel(b); break;
      case Method::kStoreLocal: store_local(b); break;
      case Method::kStoreSync: store_sync(b, servers); break;
      case Method::kStoreAsync: store_async(b, locks); break;
      case Method::kStoreBounded: store_bounded(b, locks, gate, step); break;
      case Method::kAveraging: averaging(b, networks, step); break;
      case Method::kPipeline: pipeline(b); break;
    }
    b.end_step();
  }
  if (choice.method == Method::kStoreBounded) leave_bounded_store(b, gate);
  return b.take();
}

}  // namespace lockstep::plan
