// SPDX-License-Identifier: Apache-2.0
#include "lockstep/strategy.h"

#include "lockstep/activation_checkpoint.h"
#include "lockstep/base/require.h"
#include "lockstep/base/text.h"
#include "lockstep/error.h"
#include "lockstep/strategy/autograd.h"
#include "lockstep/strategy/devices/replica.h"
#include "lockstep/strategy/pipeline/cut.h"
#include "lockstep/strategy/strategies.h"

namespace lockstep {
namespace {

std::unique_ptr<Strategy> make_single(const World& world, const Task& task, const StrategyOptions& options) {
  require(world.size() == 1, concat("strategy single trains on one rank, but there are ", world.size()),
          "leave out --ranks, or choose --strategy ddp");
  return make_ddp(world, task, options);
}

HeldBytes bytes_of_single(const PlannedRun& run) {
  PlannedRun alone = run;
  alone.devices = alone.machines = 1;
  return bytes_of_ddp(alone);
}

struct Entry {
  StrategyInfo info;
  MakeStrategy* make;
  BytesOf* bytes;
};

// Every strategy, once: the command line, its help, the metrics, forecasts and make_strategy() read this table.
constexpr Entry kEntries[] = {
    {{StrategyKind::kSingle, "single", "one device, nothing to exchange"}, make_single, bytes_of_single},
    {{StrategyKind::kDdp, "ddp", "gradients exchanged after or during backward"}, make_ddp, bytes_of_ddp},
    {{StrategyKind::kTowers, "towers", "replicas as threads; --algorithm, --update", true},
     make_towers,
     bytes_of_towers},
    {{StrategyKind::kDataParallel, "data_parallel", "outputs, loss and gradients meet on device 0", true},
     make_data_parallel,
     bytes_of_data_parallel},
    {{StrategyKind::kKVStore, "kvstore", "parameter server, synchronous or not; --kvstore", true},
     make_kvstore_strategy,
     bytes_of_kvstore},
    {{StrategyKind::kAveraging, "averaging", "separate replicas, averaged; --average-every", true},
     make_averaging,
     bytes_of_averaging},
    {{StrategyKind::kPipeline, "pipeline", "layers on different devices; --stages", true},
     make_pipeline,
     bytes_of_pipeline},
};

const Entry& entry_of(StrategyKind kind) {
  for (const Entry& entry : kEntries)
    if (entry.info.kind == kind) return entry;
  throw UsageError({.what = "StrategyOptions::kind is not a strategy", .next = "take one of StrategyKind"});
}

void require_possible(const StrategyOptions& options) {
  using enum StrategyKind;
  const StrategyKind kind = options.kind;
  const bool is_ddp = kind == kSingle || kind == kDdp;
  const std::string with = concat(" with strategy ", strategy_info(kind).name);
  const int parts = options.accumulate;
  require(parts >= 1, concat("--accumulate ", parts), "give at least 1");
  require(parts == 1 || (kind != kPipeline && kind != kDataParallel), "--accumulate" + with,
          "single, ddp, towers, kvstore and averaging have it; a pipeline has --micro-batches");
  require(parts == 1 || options.ddp.virtual_shards == 0, "--accumulate with --virtual-shards",
          "give more shards and a larger --batch-size: a rank's shards are computed one after another");
  const bool towers_have_groups = kind == kTowers && options.towers.update == UpdateOn::kDevice;
  require(options.no_decay.empty() || is_ddp || towers_have_groups || kind == kAveraging, "--no-decay" + with,
          "single, ddp, averaging, and towers with --update device have it");
  require(options.precision == Precision::kFloat32 || kind != kPipeline,
          "strategy pipeline runs the pieces of a model, which compute in the precision of their parameters",
          "leave precision float32, or choose another strategy");
  require(options.precision != Precision::kFloat16 || is_ddp, "--precision float16" + with,
          "single and ddp scale the loss, as it needs; bfloat16 needs no scale");
}

// Runs the model piece by piece, and each one again in backward.
Task recomputed(Task task, const StrategyOptions& options) {
  if (!options.checkpoint_activations) return task;
  if (!task.stages) {  // the model's type says whether it has pieces
    const auto generator = hold_generator();
    static_cast<void>(pieces_of(task, *task.make_model()));
  }
  task.stages = [task](torch::nn::Module& model) {
    std::vector<Piece> pieces = pieces_of(task, model);
    for (Piece& piece : pieces)
      piece.forward = [forward = piece.forward](const Tensors& inputs) { return checkpoint(forward, inputs); };
    return pieces;
  };
  task.forward = [stages = task.stages](torch::nn::Module& model, const Batch& batch) {
    return run_pieces(stages(model), batch);
  };
  return task;
}

// Computes in 16 bits while parameters, their gradients and the update stay in float32: matrix products and
// convolutions take 16 bits; sums that need more take float32, as autocast's lists say (PyTorch's torch.amp); the
// output becomes float32, so the loss is computed in it. Micikevicius et al., "Mixed Precision Training" (2018);
// bfloat16 has float32's range and needs no loss scaling (Kalamkar et al., 2019). With float16 the strategy scales the loss.
Task in_precision(Task task, const StrategyOptions& options) {
  if (options.precision == Precision::kFloat32) return task;
  const at::ScalarType dtype = options.precision == Precision::kFloat16 ? at::kHalf : at::kBFloat16;
  task.forward = [forward = task.forward, dtype](torch::nn::Module& model, const Batch& batch) {
    AutocastSetting setting = AutocastSetting::now();
    setting.of_device[batch.data.device().type()] = {true, dtype};
    const AutocastGuard guard(setting);
    return forward(model, batch).to(torch::kFloat32);
  };
  return task;
}

}  // namespace

const std::vector<StrategyInfo>& strategies() {
  static const std::vector<StrategyInfo> kInfos = [] {
    std::vector<StrategyInfo> infos;
    for (const Entry& entry : kEntries) infos.push_back(entry.info);
    return infos;
  }();
  return kInfos;
}

const StrategyInfo& strategy_info(StrategyKind kind) { return entry_of(kind).info; }

HeldBytes held_bytes(const PlannedRun& run) { return entry_of(run.options.kind).bytes(run); }

std::unique_ptr<Strategy> make_strategy(const World& world, const Task& task, const StrategyOptions& options) {
  require_possible(options);
  return entry_of(options.kind).make(world, in_precision(recomputed(task, options), options), options);
}

}  // namespace lockstep
