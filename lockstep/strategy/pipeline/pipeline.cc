// SPDX-License-Identifier: Apache-2.0
// `pipeline`: consecutive pieces of the model on different devices (model parallelism).
//
//   stage 0        stage 1              stage p-1
//   pieces 0-3 --> pieces 4-6 --> ... --> pieces .. and the loss     activations forward
//              <--            <-- ... <--                            gradients back
//
// A batch is cut into m micro-batches, so that stages work at the same time (strategy/pipeline/stage.h). Their losses
// are weighted by samples: the gradient is that of the whole batch. With d times as many devices as stages there are d
// replicas of each stage: the batch is cut into d parts, and the gradients of a stage are summed over its replicas.
//
// Device i has stage i % p of replica i / p. A device is one of
//
//   a thread   in a world of one rank. Activations pass through channels without a copy; the replicas share parameters,
//              and the optimizer sums gradients and updates on the cores of all devices
//   a rank     in a world of several, on one machine or more. Activations travel as messages. Every rank has the whole
//              model, but activations, gradients and updates only of its stage. synchronise() sends the parameters of all
//              stages to all ranks, and the optimizer's state to rank 0, for validation and checkpoints
//
// Stages pass on tensors as the pieces return them: several where a skip connection crosses the cut. A piece must not
// change its input in place. Batch normalisation sees one micro-batch at a time.
//
// Flow:    the part of a batch that data_world() says -> micro-batches -> strategy/pipeline/stage.h -> optimizer/
// Owns:    the devices' threads and a replica per d; or this rank's replica
// Threads: one scheduling thread
// Ranks:   every rank makes the same calls. Per micro-batch a rank sends its activations forward and their gradients
//          back; per step 2(d-1)/d K of its stage's parameters over d replicas; in synchronise() K
#include <algorithm>
#include <optional>

#include "lockstep/base/log.h"
#include "lockstep/base/text.h"
#include "lockstep/error.h"
#include "lockstep/model/parameters.h"
#include "lockstep/strategy/devices/replica_strategy.h"
#include "lockstep/strategy/devices/thread_generator.h"
#include "lockstep/strategy/pipeline/cut.h"
#include "lockstep/strategy/pipeline/stage.h"
#include "lockstep/strategy/pipeline/stage_parameters.h"
#include "lockstep/strategy/strategies.h"

namespace lockstep {
namespace {

void require_possible(const World& world, const StrategyOptions& options) {
  if (options.pipeline.micro_batches < 1)
    throw UsageError({.what = concat("--micro-batches ", options.pipeline.micro_batches), .next = "give at least 1"});
  if (std::ranges::any_of(options.places, [](const DevicePlace& place) { return !place.device.is_cpu(); }))
    throw UsageError({.what = "strategy pipeline on GPUs: its stages run on cores only",
                      .next = "give --devices cpu, or choose another strategy"});
  if (world.size() == 1) return;
  if (options.devices != 1)
    throw UsageError({.what = concat("a pipeline of ranks with ", options.devices, " devices each"),
                      .next = "give --devices-per-worker 1, or one rank with all devices"});
  if (options.clipping.max_norm > 0)
    throw UsageError({.what = "clipping by norm with stages that are processes",
                      .likely = "each stage has the norm of its own gradients only",
                      .next = "leave out --devices-per-worker, so that stages are threads, or clip by value"});
}

// Devices are numbered over all ranks: either one rank has them all, as threads, or each rank is one.
class Pipeline : public ReplicaStrategy {
 public:
  Pipeline(const World& world, const Task& task, const StrategyOptions& options)
      : ReplicaStrategy(task, {make_replica(task, options, world.size() > 1 ? world.device() : torch::kCPU)}),
        ranks_{.all = world, .of_stage = world, .of_replica = world},
        schedule_(options.pipeline.schedule),
        micro_batches_(schedule_ == PipelineSchedule::kNaive ? 1 : options.pipeline.micro_batches) {
    require_possible(world, options);
    pieces_ = {pieces_of(task, model())};
    const int devices = world.size() * options.devices;
    const auto [stages, cut] = parse_stages(options.pipeline.stages, devices, static_cast<int>(pieces_[0].size()));
    stages_ = stages;
    replica_count_ = devices / stages;
    world.size() > 1 ? become_a_rank() : start_threads(options);
    usage_ = torch::zeros({devices / world.size(), kUsages}, torch::kFloat64);
    use(cut);
    seed_steps(options.seed + 1);
  }

  BatchTotals forward_backward(const Batch& batch) override {
    if (cut_.empty()) use(measured_cut(batch));
    for (const Replica& replica : replicas_) replica.model->zero_grad();
    BatchTotals totals{.samples = sum_over(ranks_.of_stage, batch.size())};
    const Stopwatch watch;
    const auto results = run_stages(batch, totals.samples);
    record(results, watch.seconds());
    for (const StageResult& result : results) totals.mean_loss += result.loss;
    if (ranks_.all.size() == 1) return totals;
    timed(phases_.exchange, "exchange", [&] {
      parameters_->sum_gradients(ranks_);
      totals.mean_loss = sum_over(ranks_.all, totals.mean_loss);
    });
    return totals;
  }

  void update() override {
    timed(phases_.update, "update", [&] {
      if (gradients_) gradients_->set(gradients_of(replicas_));
      optimizer().step();
    });
  }

  void synchronise() override {
    if (ranks_.all.size() == 1 || cut_.empty()) return;
    parameters_->broadcast(ranks_);
    parameters_->collect_state(ranks_, optimizer());
  }

  void restored(std::int64_t) override { follow_model(replicas_); }
  World data_world(const World&) const override { return ranks_.of_stage; }

  // bubble: the share of the devices' time in forward and backward that they waited; beside it what it would be if all
  // p stages took the same time for each of m micro-batches, and nothing else any: (p-1)/(m+p-1).
  Report report() const override {
    const torch::Tensor of_devices = ranks_.all.all_gather(usage_).flatten(0, 1);
    const torch::Tensor seconds = of_devices.sum(0);
    Report report = {{"stages", stages_},
                     {"replicas", replica_count_},
                     {"micro_batches", static_cast<double>(micro_batches_)},
                     {"bubble", 1 - (seconds[kBusy] / seconds[kWall]).item<double>()},
                     {"ideal_bubble", (stages_ - 1) / static_cast<double>(micro_batches_ + stages_ - 1)}};
    const torch::Tensor of_stages = of_devices.view({replica_count_, stages_, kUsages}).amax(0);
    for (int stage = 0; stage < stages_; ++stage) {
      report.emplace_back(concat("stage_", stage, "_in_flight"), of_stages[stage][kInFlight].item<double>());
      report.emplace_back(concat("stage_", stage, "_bytes"), of_stages[stage][kBytes].item<double>());
    }
    return report;
  }

 private:
  enum Usage { kBusy, kWall, kInFlight, kBytes, kUsages };  // of a device: seconds, and the most so far

  // The replicas share parameters; collectives are between the devices of a stage.
  void start_threads(const StrategyOptions& options) {
    devices_ = make_devices(ranks_.all, options, stages_);
    if (replica_count_ > 1) replicas_ = make_replicas(replica_count_, task_, options);
    gradients_ = share_parameters(*devices_, replicas_);
    pieces_.clear();
    for (const Replica& replica : replicas_) pieces_.push_back(pieces_of(task_, *replica.model));
    own_stages_ = {0, stages_};
  }

  void become_a_rank() {
    const World world = ranks_.all;
    const int stage = world.rank() % stages_;
    ranks_.of_stage = *world.split(stage, world.rank());
    ranks_.of_replica = *world.split(world.rank() / stages_, world.rank());
    own_stages_ = {stage, stage + 1};
    auto tensors = named_parameters(model());
    for (auto& buffer : named_buffers(model())) tensors.push_back(buffer);
    require_same_model(world, tensors);
    broadcast_tensors(world, tensors);
  }

  // Rank 0's measurement decides.
  Cut measured_cut(const Batch& batch) {
    torch::Tensor costs = torch::zeros({static_cast<std::int64_t>(pieces_[0].size())}, torch::kFloat64);
    if (ranks_.all.rank() == 0) {
      const auto parts = micro_batches_ * static_cast<std::int64_t>(replicas_.size());
      const std::int64_t samples = std::max<std::int64_t>(1, batch.size() / parts);
      const torch::Tensor data = in_layout(batch.data.slice(0, 0, samples), replicas_.front().layout);
      costs = torch::tensor(measure_pieces(pieces_[0], model(), data), torch::kFloat64);
    }
    ranks_.all.broadcast(costs);
    const auto* cost = costs.const_data_ptr<double>();
    return balanced_cut({cost, cost + costs.numel()}, stages_);
  }

  void use(const Cut& cut) {
    cut_ = cut;
    if (cut.empty()) return;
    log_debug(concat("pipeline stages: ", to_string(cut)));
    if (ranks_.all.size() > 1) parameters_.emplace(pieces_[0], cut);
  }

  // Runs every stage of this process, all at the same time.
  IntVector<StageResult> run_stages(const Batch& batch, std::int64_t samples) {
    const auto work = std::make_shared<const IntVector<StageWork>>(work_of_stages(batch, samples));
    if (!devices_) {
      const ThreadGenerator generator((*work)[0].seed);
      return {run_stage(task_, (*work)[0], message_links(ranks_.of_replica))};
    }
    std::size_t most = 1;  // micro-batches of a replica
    for (const StageWork& each : *work) most = std::max(most, each.micro_batches.elements().size());
    const auto links = thread_links(devices_->size(), stages_, most);
    const auto results = std::make_shared<IntVector<StageResult>>(devices_->size());
    // `models` keeps alive what the pieces point to, should a device be left behind.
    devices_->run([work, links, results, task = task_, models = replicas_](Device& device) {
      (*results)[device.index()] = run_stage(task, (*work)[device.index()], links(device));
    });
    return *results;
  }

  // In the order of the devices: the stages of the first replica of this process, then those of the next.
  IntVector<StageWork> work_of_stages(const Batch& batch, std::int64_t samples) const {
    const std::uint64_t seed = draw_seed();
    const int first_replica = ranks_.of_stage.rank();
    const auto replicas = static_cast<int>(replicas_.size());
    IntVector<StageWork> work;
    for (int replica = 0; replica < replicas; ++replica) {
      IntVector<Batch> micro_batches = micro_batches_of(part_of(batch, replica, replicas), micro_batches_);
      for (Batch& each : micro_batches) each.data = in_layout(each.data, replicas_.front().layout);
      for (auto stage = static_cast<int>(own_stages_.begin); stage < own_stages_.end; ++stage)
        work.push_back({.pieces = pieces_in(pieces_[replica], cut_[stage]),
                        .micro_batches = micro_batches,
                        .steps = steps_of_stage(schedule_, stage, stages_, micro_batches.size()),
                        .samples = samples,
                        .seed = seed_of(seed, first_replica + replica),
                        .first_piece = static_cast<int>(cut_[stage].begin)});
    }
    return work;
  }

  void record(const IntVector<StageResult>& results, double seconds) {
    phases_.backward += seconds;  // forward and backward take turns
    auto usage = usage_.accessor<double, 2>();
    for (int i = 0; i < results.size(); ++i) {
      usage[i][kBusy] += results[i].busy;
      usage[i][kWall] += seconds;
      usage[i][kInFlight] = std::max(usage[i][kInFlight], static_cast<double>(results[i].in_flight));
      usage[i][kBytes] = std::max(usage[i][kBytes], static_cast<double>(results[i].memory));
    }
  }

  PipelineRanks ranks_;  // all three are the world where it has one rank
  PipelineSchedule schedule_;
  std::int64_t micro_batches_;
  IntVector<std::vector<Piece>> pieces_;  // of each replica of this process
  int stages_ = 0;
  int replica_count_ = 0;                      // of all ranks
  Range own_stages_;                           // that this process has, of each of its replicas
  Cut cut_;                                    // empty until the first batch has been measured
  std::shared_ptr<LocalGradients> gradients_;  // of threads
  std::optional<StageParameters> parameters_;  // of ranks
  torch::Tensor usage_;                        // [device of this process][Usage]
};

}  // namespace

std::unique_ptr<Strategy> make_pipeline(const World& world, const Task& task, const StrategyOptions& options) {
  return std::make_unique<Pipeline>(world, task, options);
}

}  // namespace lockstep
