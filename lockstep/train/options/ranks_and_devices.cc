// SPDX-License-Identifier: Apache-2.0
#include "lockstep/train/options/ranks_and_devices.h"

#include <algorithm>
#include <optional>

#include "lockstep/base/require.h"
#include "lockstep/base/text.h"
#include "lockstep/collective/gpus.h"
#include "lockstep/error.h"
#include "lockstep/strategy/strategies.h"

namespace lockstep {
namespace {

using Places = std::vector<DevicePlace>;

// --devices-per-worker of a worker: 0 if it is not given.
int devices_of_worker(const TrainOptions& options, int worker) {
  const auto& devices = options.devices_per_worker;
  if (devices.empty()) return 0;
  if (devices.size() == 1) return devices.front();
  require(worker < std::ssize(devices),
          concat("--devices-per-worker has ", devices.size(), " numbers, but there is a worker ", worker),
          "give one number for all workers, or one for each");
  return *std::next(devices.begin(), worker);
}

// Tells whether --ranks counts devices that are threads of one process.
bool ranks_are_devices(const TrainOptions& options) {
  return strategy_info(options.strategy.kind).threads && options.devices_per_worker.empty() &&
         server_count(options) == 0;
}

// --ranks counts devices, be they threads or processes.
bool one_device_per_rank(const TrainOptions& options) {
  return ranks_are_devices(options) || !strategy_info(options.strategy.kind).threads;
}

// The list of --devices; empty where it names a kind.
Places listed(const TrainOptions& options) {
  if (options.devices == "auto" || options.devices == "cpu" || options.devices == "cuda") return {};
  return parse_device_places(options.devices);
}

}  // namespace

std::optional<torch::DeviceType> wanted_kind(const TrainOptions& options) {
  if (options.devices == "auto") return options.device;
  const Places list = listed(options);
  const torch::DeviceType kind = !list.empty()               ? list.front().device.type()
                                 : options.devices == "cuda" ? torch::kCUDA
                                                             : torch::kCPU;
  require(!options.device || *options.device == kind, concat("--devices ", options.devices, " with another --device"),
          "leave out --device");
  return kind;
}

namespace {

// Every device there is. In the process that starts the ranks it must not initialise CUDA.
int all_devices(const TrainOptions& options) {
  if (const Places list = listed(options); !list.empty()) return static_cast<int>(list.size());
  const auto kind = wanted_kind(options);
  if (const int gpus = kind == torch::kCPU ? 0 : cuda_device_count_before_fork(); gpus > 0) return gpus;
  if (kind == torch::kCUDA) require_gpus(0);
  return allotted_cores();
}

// Without --ranks: a rank or device for each that --devices names.
int default_ranks(const TrainOptions& options) {
  const bool names_several = options.devices != "auto" && options.devices != "cpu";
  const bool takes_several = options.strategy.kind != StrategyKind::kSingle && one_device_per_rank(options);
  return names_several && takes_several ? all_devices(options) : 1;
}

int rank_count(const TrainOptions& options) {
  if (options.ranks == "auto") return all_devices(options);
  if (options.ranks.empty()) return default_ranks(options);
  int ranks = 0;
  require(parse_int(options.ranks, ranks) && ranks > 0, concat("--ranks ", options.ranks, " is not a number of ranks"),
          "give a positive number, or auto for one per core or GPU");
  const Places list = listed(options);
  require(list.empty() || !one_device_per_rank(options) || std::ssize(list) == ranks,
          concat("--ranks ", ranks, " with ", list.size(), " devices: --devices ", options.devices),
          "leave out --ranks, or name as many devices");
  return ranks;
}

// The ranks of this machine that are servers come first.
int servers_here(const TrainOptions& options, const JobEnvironment& job) {
  if (job.local_servers > 0) return job.local_servers;
  return std::clamp(server_count(options) - (job.rank - job.local_rank), 0, job.local_size);
}

// A worker's number where the servers are the first ranks of its machine, or of all.
int worker_number(const TrainOptions& options, const JobEnvironment& job) {
  if (job.local_servers == 0) return job.rank - server_count(options);
  return job.rank - (job.node_rank + 1) * job.local_servers;
}

int devices_of_rank(const TrainOptions& options, const JobEnvironment& job) {
  if (!strategy_info(options.strategy.kind).threads || is_server(options, job)) return 1;
  if (ranks_are_devices(options)) return options.launcher == "none" ? rank_count(options) : 1;
  return std::max(1, devices_of_worker(options, worker_number(options, job)));
}

// A worker's part of the devices of a machine, counted in the order of its workers.
struct Share {
  int before = 0;  // that workers before this one have
  int mine = 0;
  int all = 0;
};

Share share_of(const TrainOptions& options, const JobEnvironment& job) {
  const int servers = servers_here(options, job);
  Share share{.mine = devices_of_rank(options, job)};
  for (int local = servers; local < job.local_size; ++local) {
    JobEnvironment worker = job;
    worker.rank += local - job.local_rank;
    worker.local_rank = local;
    const int devices = devices_of_rank(options, worker);
    share.all += devices;
    if (local < job.local_rank) share.before += devices;
  }
  return share;
}

// A launcher, or a script between it and the ranks, may let each rank see its own GPUs only. Ranks that `lockstep train`
// has started itself all see the same.
bool sees_own_gpus_only(const TrainOptions& options, const Share& share) {
  return options.launcher != "none" && std::getenv("CUDA_VISIBLE_DEVICES") != nullptr && share.mine > 0 &&
         cuda_device_count() == share.mine;
}

// Tells whether GPUs are chosen for a machine that needs `share.all`. torchrun and `lockstep run` give all ranks the same
// CUDA_VISIBLE_DEVICES, so four ranks that see one GPU see the same.
bool takes_gpus(const TrainOptions& options, const Share& share) {
  if (const auto wanted = wanted_kind(options)) return *wanted == torch::kCUDA;
  return cuda_device_count() >= share.all || (options.launcher != "torchrun" && sees_own_gpus_only(options, share));
}

Places share_of_gpus(const TrainOptions& options, const Share& share) {
  const int before = sees_own_gpus_only(options, share) ? 0 : share.before;
  const Places gpus = even_places(torch::kCUDA, before + share.mine);
  return {gpus.begin() + before, gpus.end()};
}

// Ranks of ddp and of a pipeline exchange over NCCL, which takes one for each GPU.
void require_a_gpu_for_each_rank(const TrainOptions& options, const Places& list) {
  const bool over_nccl =
      options.strategy.kind == StrategyKind::kDdp || options.strategy.kind == StrategyKind::kPipeline;
  for (auto place = list.begin(); over_nccl && place != list.end(); ++place)
    if (!place->device.is_cpu() && std::find(list.begin(), place, *place) != place)
      throw UsageError({.what = concat("--devices ", options.devices, ": ", place->device.str(), " is named twice"),
                        .likely = "ranks that are processes exchange over NCCL, which takes one for each GPU",
                        .next = "name a GPU for each rank, or choose --strategy towers, whose devices may share one"});
}

}  // namespace

int server_count(const TrainOptions& options) {
  const StrategyOptions& strategy = options.strategy;
  const bool servers = strategy.kind == StrategyKind::kKVStore && has_servers(strategy.kvstore.kind);
  return servers ? strategy.kvstore.servers : 0;
}

int ranks_to_start(const TrainOptions& options) {
  return ranks_are_devices(options) ? 1 : server_count(options) + rank_count(options);
}

int devices_in_all(const TrainOptions& options, int ranks) {
  if (!strategy_info(options.strategy.kind).threads) return ranks;
  if (ranks_are_devices(options)) return ranks == 1 ? rank_count(options) : ranks;
  int devices = 0;
  for (int worker = 0; worker < ranks - server_count(options); ++worker)
    devices += std::max(1, devices_of_worker(options, worker));
  return devices;
}

bool is_server(const TrainOptions& options, const JobEnvironment& job) {
  return job.serves().value_or(job.rank < server_count(options));
}

std::vector<DevicePlace> places_of_rank(const TrainOptions& options, const JobEnvironment& job) {
  if (is_server(options, job)) return even_places(torch::kCPU, 1);
  const Share share = share_of(options, job);
  const Places list = listed(options);
  if (list.empty())
    return takes_gpus(options, share) ? share_of_gpus(options, share) : even_places(torch::kCPU, share.mine);
  require(std::ssize(list) == share.all,
          concat("--devices ", options.devices, " has ", list.size(), " devices, but the ranks of this machine have ",
                 share.all),
          "name one for each of them; strategy single has one, ddp one in each rank");
  if (job.world_size > 1) require_a_gpu_for_each_rank(options, list);
  return {list.begin() + share.before, list.begin() + share.before + share.mine};
}

}  // namespace lockstep
