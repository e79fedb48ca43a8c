// SPDX-License-Identifier: Apache-2.0
#include "lockstep/plan/target.h"

#include "lockstep/base/text.h"
#include "lockstep/error.h"
#include "lockstep/strategy/option_names.h"

namespace lockstep::plan {
namespace {

void require(bool possible, const std::string& what, const std::string& next) {
  if (!possible) throw UsageError({.what = concat("a target that can't be: ", what), .next = next});
}

}  // namespace

void require_possible(const Target& target) {
  require(target.machines >= 1, concat(target.machines, " machines"), "--machines takes 1 or more");
  require(target.devices >= 1, concat(target.devices, " devices on a machine"), "--devices takes 1 or more");
  require(target.cores >= 0, concat(target.cores, " cores on a machine"), "--cores takes 1 or more");
  require(target.link_rate > 0, "links that carry nothing", "--link-mbit takes megabits per second, such as 1000");
  require(target.link_latency >= 0, "a link that delivers before it was sent to", "--link-latency-us takes 0 or more");
  require(target.servers >= 1, concat(target.servers, " servers"), "--servers takes 1 or more");
  require(target.batch >= target.all_devices(),
          concat("a batch of ", target.batch, " for ", target.all_devices(), " devices: some would have nothing to do"),
          "give a larger --batch-size, or fewer machines or devices");
}

bool has_device_threads(Method method) {
  return method == Method::kTowers || method == Method::kDataParallel || method == Method::kStoreLocal ||
         method == Method::kAveraging || method == Method::kPipeline;
}

std::string Choice::name() const {
  switch (method) {
    case Method::kSingle: return "single";
    case Method::kDdp:
      return bucket_bytes == kUsualBucket
                 ? "ddp"
                 : concat("ddp, buckets of ", human_bytes(static_cast<std::uint64_t>(bucket_bytes)));
    case Method::kTowers: return update_on_cpu ? "towers, one update" : "towers";
    case Method::kDataParallel: return "data_parallel";
    case Method::kStoreLocal: return "kvstore local";
    case Method::kStoreSync: return concat("kvstore dist_sync, ", servers, servers == 1 ? " server" : " servers");
    case Method::kStoreAsync: return concat("kvstore dist_async, ", servers, servers == 1 ? " server" : " servers");
    case Method::kAveraging: return concat("averaging, h = ", average_every);
    case Method::kPipeline:
      return order == PipelineSchedule::kNaive
                 ? concat("pipeline naive, ", stages, " stages")
                 : concat("pipeline ", name_of(order), ", ", stages, " x ", micro_batches);
  }
  return "";
}

std::string Choice::arguments(int ranks) const {
  const std::string count = ranks > 1 ? concat(" --ranks ", ranks) : "";
  switch (method) {
    case Method::kSingle: return "--strategy single";
    case Method::kDdp: return "--strategy ddp" + count;
    case Method::kTowers: return concat("--strategy towers", count, update_on_cpu ? " --update cpu" : "");
    case Method::kDataParallel: return "--strategy data_parallel" + count;
    case Method::kStoreLocal: return concat("--strategy kvstore --kvstore local", count);
    case Method::kStoreSync: return concat("--strategy kvstore --kvstore dist_sync --servers ", servers, count);
    case Method::kStoreAsync: return concat("--strategy kvstore --kvstore dist_async --servers ", servers, count);
    case Method::kAveraging: return concat("--strategy averaging --average-every ", average_every, count);
    case Method::kPipeline:
      return concat("--strategy pipeline --pipeline-schedule ", name_of(order), " --stages ", stages,
                    " --micro-batches ", micro_batches, count);
  }
  return "";
}

bool Choice::exact() const { return method != Method::kStoreAsync && method != Method::kAveraging; }

std::vector<Choice> choices_for(const Target& target, int pieces, double parameter_bytes) {
  if (target.all_devices() == 1) return {{.method = Method::kSingle}};
  std::vector<Choice> all{{.method = Method::kDdp}};
  if (target.machines > 1) {
    for (const double mib : {1.0, 5.0})
      if (mib * (1 << 20) < parameter_bytes) all.push_back({.method = Method::kDdp, .bucket_bytes = mib * (1 << 20)});
  } else {
    all.push_back({.method = Method::kTowers});
    all.push_back({.method = Method::kTowers, .update_on_cpu = true});
    all.push_back({.method = Method::kDataParallel});
    all.push_back({.method = Method::kStoreLocal});
  }
  all.push_back({.method = Method::kStoreSync, .servers = target.servers});
  all.push_back({.method = Method::kStoreAsync, .servers = target.servers});
  for (const int every : {1, 8}) all.push_back({.method = Method::kAveraging, .average_every = every});
  const int stages = target.all_devices();
  if (stages > pieces) return all;
  all.push_back({.method = Method::kPipeline, .order = PipelineSchedule::kNaive, .stages = stages, .micro_batches = 1});
  for (const PipelineSchedule order : {PipelineSchedule::kGPipe, PipelineSchedule::k1F1B})
    for (const int micro_batches : {4, 8})
      if (micro_batches <= target.batch)
        all.push_back({.method = Method::kPipeline, .order = order, .stages = stages, .micro_batches = micro_batches});
  return all;
}

}  // namespace lockstep::plan
