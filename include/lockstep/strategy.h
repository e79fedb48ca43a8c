// SPDX-License-Identifier: Apache-2.0
// lockstep/strategy.h: how ranks and devices train one model. The training loop knows only this interface.
//
// Flow:    Task + Batch -> forward_backward(): forward, backward, exchange -> update() -> parameters
// Owns:    the model and the optimizer
// Threads: one thread
// Ranks:   every rank makes the same calls in the same order
#pragma once

#include "lockstep/batch_totals.h"
#include "lockstep/communication_hook.h"
#include "lockstep/devices.h"
#include "lockstep/layout.h"
#include "lockstep/optimizers.h"
#include "lockstep/task.h"

namespace lockstep {

// Seconds of this rank, added up since the strategy was made: where a step's time goes.
struct PhaseTimes {
  double forward = 0;
  double backward = 0;  // with the part of the exchange that runs behind it
  // The rest of the exchange after backward. Where a rank is a GPU (`ddp`, `single`) also the wait for its work.
  double exchange = 0;
  double update = 0;
};

// ---- what a strategy is made from. The names of the enumerators on the command line are in option_names.h.

enum class StrategyKind { kSingle, kDdp, kTowers, kDataParallel, kKVStore, kAveraging, kPipeline };

// The dtype of forward and backward; parameters, gradients and the update stay in float32. kFloat16: single and ddp.
enum class Precision { kFloat32, kBFloat16, kFloat16 };

struct DdpOptions {
  bool share_parameters = true;  // one copy per machine (lockstep/ddp.h)
  int bucket_mib = 0;      // of gradients that are exchanged at once, where they are (lockstep/ddp.h); 0: as there
  int virtual_shards = 0;  // the same bits on any number of ranks that divides this (lockstep/ddp.h); 0: off
};

enum class UpdateOn {
  kDevice,  // every device updates its own copy
  kCpu      // the parameters exist once, and are updated once
};

struct TowersOptions {
  UpdateOn update = UpdateOn::kDevice;
  bool refuse_uneven = false;  // a batch that the devices do not divide is an error
};

// The format in which a change of parameters goes between machines. kInt8 adds its rounding errors to the next change.
enum class AverageIn { kFloat32, kInt8 };

struct AveragingOptions {
  int64_t every = 1;          // steps between two averages
  double outer_lr = 1;        // with outer_momentum 0: takes the average as it is
  double outer_momentum = 0;  // Nesterov's; with it this is DiLoCo (Douillard et al., 2023)
  int64_t parts = 1;          // of the parameters; each is averaged in its turn, every `every` steps
  int64_t delay = 0;          // steps that go on while a part is under way (Streaming DiLoCo: Douillard et al., 2025)
  double mix = 0.5;           // with a delay: the share of a replica's own parameters when the average comes
  AverageIn in = AverageIn::kFloat32;
};

// The place where pushed gradients are summed, and who updates; docs/strategies/kvstore.md compares them.
enum class KVStoreKind {
  kLocal,  // one of the next three, whichever suits the model
  kLocalUpdateCpu,
  kLocalAllReduceCpu,
  kLocalAllReduceDevice,
  kDistSync,
  kDistAsync,
  kDistBounded
};

struct KVStoreOptions {
  KVStoreKind kind = KVStoreKind::kLocal;
  int servers = 1;                  // dist_*: the first ranks of the world are servers ...
  std::optional<bool> serves{};     // ... unless each rank says whether it is one, or `lockstep run --servers` did
  bool update_on_kvstore = true;    // dist_sync: servers update; false: workers do
  int64_t staleness = 4;            // dist_bounded: the largest delay of a gradient, in updates
  bool adapt_to_delay = true;       // dist_async, dist_bounded: docs/strategies/kvstore.md; false: MXNet's plain rule
  int64_t split_above = 1'000'000;  // elements from which a weight is split over the servers
};

// The order in which a stage works on its micro-batches.
enum class PipelineSchedule {
  kNaive,  // the whole batch forward, then back
  kGPipe,  // all micro-batches forward, then all back (Huang et al., 2019)
  k1F1B    // one forward and one back in turn (Narayanan et al., 2019)
};

struct PipelineOptions {
  std::string stages{};       // how many: "4"; or the pieces of each: "0-3,4-9"; empty: one per device
  int64_t micro_batches = 4;  // parts of each batch
  PipelineSchedule schedule = PipelineSchedule::k1F1B;
};

struct StrategyOptions {
  StrategyKind kind = StrategyKind::kDdp;
  OptimizerOptions optimizer{};
  ClippingOptions clipping{};
  std::string no_decay{};  // of "norm,bias": parameters whose weight decay is 0; single, ddp, towers, averaging
  double ema_decay = 0;    // 0: no moving average of the parameters
  uint64_t seed = 0;       // of the initial parameters
  Precision precision = Precision::kFloat32;
  int accumulate = 1;  // parts of each device's batch, computed one after another; data_parallel, pipeline: 1
  bool checkpoint_activations = false;       // backward computes each piece of the model again (task.h)
  std::optional<Layout> layout{};            // none: preferred_layout()
  int devices = 1;                           // threads of this process; `single` and `ddp` have one
  std::vector<DevicePlace> places{};         // where each of these is; empty: cores
  milliseconds timeout = kDefaultTimeout;    // how long any wait for a device may take
  Algorithm algorithm = Algorithm::kDirect;  // towers, ddp: how gradients are summed
  CompressionOptions compression{};          // ddp, kvstore dist_*: of gradients between ranks
  DdpOptions ddp{};
  TowersOptions towers{};
  AveragingOptions averaging{};
  KVStoreOptions kvstore{};
  PipelineOptions pipeline{};
};

// ---- the interface

using Report = std::vector<std::pair<std::string, double>>;  // what a strategy measured, by name

// Which ranks of the job do what together.
struct StrategyRanks {
  World data;            // those that share out the batches: each loads its part of them
  World validation;      // those that share out the batches of validation
  World step;            // those that take each step at the same time: all of them validate and save. World::single():
                         // every rank goes at its own pace, and the first rank of the job validates and saves alone
  bool has_data = true;  // false: this rank's batches are empty
};

class Strategy {
 public:
  virtual ~Strategy() = default;

  // world: all ranks of the job.
  virtual StrategyRanks ranks(const World& world) const { return {.data = world, .validation = world, .step = world}; }

  // This rank's devices, where it has several.
  virtual const Devices* devices() const { return nullptr; }

  // Forward, backward and exchange for this rank's part of the global batch (which may be empty). The parameters stay
  // as they are. Returns the samples and the mean loss of the global batch: the same on every rank.
  virtual BatchTotals forward_backward(const Batch& batch) = 0;

  // Called before forward_backward(), with the batch after that: begins to bring it to the devices while the step runs.
  // Does not block. Only where prefetches(): the loop then asks for batches in pinned memory.
  virtual void prefetch(const Batch& /*next*/) {}
  bool prefetches() const { return devices() != nullptr && devices()->on_gpus(); }

  // Applies what forward_backward() found.
  virtual void update() = 0;

  // Returns the output with the current parameters, for validation. It is undefined where another rank has it (a
  // pipeline of ranks: the last stage); then all ranks of StrategyRanks::step call it, those of a pipeline's replica
  // with the same batch.
  virtual Tensor forward(const Batch& batch) = 0;

  // In a pipeline of ranks, parameters and buffers of other stages are meta tensors.
  virtual torch::nn::Module& model() = 0;
  virtual Optimizer& optimizer() = 0;  // the one whose learning rate and state count; others follow it
  virtual const PhaseTimes& phases() const = 0;

  // Makes replicas that may differ for a while one model. All ranks call it, before model() is validated or saved.
  virtual void synchronise() {}

  // Tensors that this rank alone has besides state(), such as residuals of compressed gradients: kept in memory for the
  // rank that takes its place, and not in checkpoints. Neither call waits for other ranks.
  virtual NamedTensors own_state() { return {}; }
  virtual void set_own_state(const NamedTensors& state) { static_cast<void>(state); }

  // False while replicas may differ, so that synchronise() would change them. The same on every rank.
  bool is_one_model() const { return is_one_model_; }

  // After every rank has put the same checkpoint, of `step`, into model(), optimizer() and state(): other replicas
  // follow, and random numbers that depend on the step go on from there. All ranks call it; blocks until all have.
  virtual void restored(int64_t /*step*/) {}

  // Tensors that a checkpoint keeps besides model() and optimizer(); restored in place.
  virtual NamedTensors state() { return {}; }

  virtual Report report() const { return {}; }      // for the metrics of the run; all of StrategyRanks::step call it
  virtual std::string table() const { return {}; }  // the same for people: lines; empty: nothing to show

 protected:
  bool is_one_model_ = true;
};

struct StrategyInfo {
  StrategyKind kind;
  const char* name;         // of --strategy
  const char* description;  // one line of a table: at most 54 characters
  bool threads = false;     // its devices are threads of one process: that is what --ranks counts
};
const std::vector<StrategyInfo>& strategies();
const StrategyInfo& strategy_info(StrategyKind kind);

// Throws UsageError (options that do not go together), and what the strategy throws when it is made.
std::unique_ptr<Strategy> make_strategy(const World& world, const Task& task, const StrategyOptions& options);

}  // namespace lockstep
