// SPDX-License-Identifier: Apache-2.0
#include "lockstep/plan/target.h"

#include <algorithm>
#include <cmath>

#include "lockstep/base/text.h"
#include "lockstep/error.h"
#include "lockstep/strategy/option_names.h"

namespace lockstep::plan {
namespace {

void require(bool possible, const std::string& what, const std::string& next) {
  if (!possible) throw UsageError({.what = concat("a target that can't be: ", what), .next = next});
}

// Ranks of one machine read each other's gradients: they have no buckets, and nothing to compress.
void add_between_machines(std::vector<Choice>& all, double parameter_bytes) {
  for (const double mib : {1.0, 5.0})
    if (mib * (1 << 20) < parameter_bytes) all.push_back({.method = Method::kDdp, .bucket_bytes = mib * (1 << 20)});
  for (const auto& each : kNames<Compression>)
    if (each.value != Compression::kNone) all.push_back({.method = Method::kDdp, .compression = each.value});
}

// One, two, four, eight, and one for each of up to 16 machines. On one machine a second server has no link to add.
std::vector<int> numbers_of_servers(const Target& target) {
  if (target.servers > 0) return {target.servers};
  std::vector<int> numbers;
  for (int servers = 1; servers <= std::min(target.machines, 8); servers *= 2) numbers.push_back(servers);
  if (target.machines <= 16 && numbers.back() != target.machines) numbers.push_back(target.machines);
  return numbers;
}

void add_stores(std::vector<Choice>& all, int servers, bool can_compress) {
  all.push_back({.method = Method::kStoreSync, .servers = servers});
  if (can_compress)
    all.push_back({.method = Method::kStoreSync, .servers = servers, .compression = Compression::kTwoBit});
  all.push_back({.method = Method::kStoreAsync, .servers = servers});
  for (const int staleness : {1, 4})
    all.push_back({.method = Method::kStoreBounded, .servers = servers, .staleness = staleness});
}

void add_pipelines(std::vector<Choice>& all, const Target& target) {
  const int stages = target.all_devices();
  all.push_back({.method = Method::kPipeline, .order = PipelineSchedule::kNaive, .stages = stages, .micro_batches = 1});
  for (const PipelineSchedule order : {PipelineSchedule::kGPipe, PipelineSchedule::k1F1B})
    for (const int micro_batches : {2, 4, 8, 16})
      if (micro_batches <= target.batch)
        all.push_back({.method = Method::kPipeline, .order = order, .stages = stages, .micro_batches = micro_batches});
}

}  // namespace

void require_possible(const Target& target) {
  require(target.machines >= 1, concat(target.machines, " machines"), "--machines takes 1 or more");
  require(target.devices >= 1, concat(target.devices, " devices on a machine"), "--devices takes 1 or more");
  require(std::int64_t{target.machines} * target.devices <= kMostDevices,
          concat(target.machines, " machines with ", target.devices, " devices each"),
          concat("together there may be ", with_thousands(kMostDevices), " devices"));
  require(target.cores >= 0 && target.cores <= kMostDevices, concat(target.cores, " cores on a machine"),
          concat("--cores takes 0 to ", with_thousands(kMostDevices)));
  require(std::isfinite(target.link_rate) && target.link_rate > 0,
          concat("links that carry ", target.link_rate, " bytes/s"),
          "--link-mbit takes megabits per second, such as 1000");
  require(std::isfinite(target.link_latency) && target.link_latency >= 0,
          concat("links with a latency of ", target.link_latency, " s"),
          "--link-latency-us takes microseconds: 0 or more");
  require(target.servers >= 0 && target.servers <= kMostDevices, concat(target.servers, " servers"),
          concat("--servers takes 0 to ", with_thousands(kMostDevices)));
  require(target.batch >= target.all_devices(),
          concat("a batch of ", target.batch, " for ", target.all_devices(), " devices: some would have nothing to do"),
          "give a larger --batch-size, or fewer machines or devices");
}

std::string Choice::name() const {
  const std::string lossy = compression == Compression::kNone ? "" : concat(", ", name_of(compression));
  const std::string of_servers = concat(servers, servers == 1 ? " server" : " servers");
  switch (method) {
    case Method::kSingle: return "single";
    case Method::kDdp:
      return bucket_bytes == kBucketBytes
                 ? "ddp" + lossy
                 : concat("ddp, buckets of ", human_bytes(static_cast<std::uint64_t>(bucket_bytes)), lossy);
    case Method::kTowers: return update_on_cpu ? "towers, one update" : "towers";
    case Method::kDataParallel: return "data_parallel";
    case Method::kStoreLocal: return "kvstore local";
    case Method::kStoreSync: return concat("kvstore dist_sync, ", of_servers, lossy);
    case Method::kStoreAsync: return concat("kvstore dist_async, ", of_servers, lossy);
    case Method::kStoreBounded: return concat("kvstore dist_bounded ", staleness, ", ", of_servers, lossy);
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
  const std::string lossy = compression == Compression::kNone ? "" : concat(" --compression ", name_of(compression));
  const std::string of_servers = concat(" --servers ", servers, count, lossy);
  switch (method) {
    case Method::kSingle: return "--strategy single";
    case Method::kDdp:
      return bucket_bytes == kBucketBytes
                 ? concat("--strategy ddp", count, lossy)
                 : concat("--strategy ddp --bucket-mib ", fixed(bucket_bytes / (1 << 20), 0), count, lossy);
    case Method::kTowers: return concat("--strategy towers", count, update_on_cpu ? " --update cpu" : "");
    case Method::kDataParallel: return "--strategy data_parallel" + count;
    case Method::kStoreLocal: return concat("--strategy kvstore --kvstore local", count);
    case Method::kStoreSync: return "--strategy kvstore --kvstore dist_sync" + of_servers;
    case Method::kStoreAsync: return "--strategy kvstore --kvstore dist_async" + of_servers;
    case Method::kStoreBounded:
      return concat("--strategy kvstore --kvstore dist_bounded --staleness ", staleness, of_servers);
    case Method::kAveraging: return concat("--strategy averaging --average-every ", average_every, count);
    case Method::kPipeline:
      return concat("--strategy pipeline --pipeline-schedule ", name_of(order), " --stages ", stages,
                    " --micro-batches ", micro_batches, count);
  }
  return "";
}

bool Choice::has_device_threads() const {
  return method == Method::kTowers || method == Method::kDataParallel || method == Method::kStoreLocal ||
         method == Method::kAveraging || method == Method::kPipeline;
}

bool Choice::has_servers() const {
  return method == Method::kStoreSync || method == Method::kStoreAsync || method == Method::kStoreBounded;
}

bool Choice::exact() const {
  return method != Method::kStoreAsync && method != Method::kStoreBounded && method != Method::kAveraging &&
         compression == Compression::kNone;
}

std::vector<Choice> choices_for(const Target& target, int pieces, double parameter_bytes) {
  if (target.all_devices() == 1) return {{.method = Method::kSingle}};
  std::vector<Choice> all{{.method = Method::kDdp}};
  if (target.machines > 1) {
    add_between_machines(all, parameter_bytes);
  } else {
    all.push_back({.method = Method::kTowers});
    all.push_back({.method = Method::kTowers, .update_on_cpu = true});
    all.push_back({.method = Method::kDataParallel});
    all.push_back({.method = Method::kStoreLocal});
  }
  constexpr int kMostWorkers = 64;  // more hold each other up at any server
  if (target.all_devices() <= kMostWorkers || target.servers > 0)
    for (const int servers : numbers_of_servers(target)) add_stores(all, servers, target.machines > 1);
  for (const int every : {1, 4, 8, 16}) all.push_back({.method = Method::kAveraging, .average_every = every});
  if (target.all_devices() <= pieces) add_pipelines(all, target);
  return all;
}

}  // namespace lockstep::plan
