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
//   a thread   in a world of one rank. On cores activations pass through channels without a copy; the replicas share parameters,
//              and the optimizer sums gradients and updates on the cores of all devices. A GPU copies what it gets from its
//              neighbour, and has parameters, gradients and optimizer state of its own stage only (strategy/pipeline/gpu_stages.h)
//   a rank     in a world of several, on one machine or more. Activations travel as messages. A rank has parameters,
//              gradients and optimizer state of its own stage only, from the start (model/partial_model.h): model()
//              has meta tensors in place of the others, and checkpoints are gathered tensor by tensor (train/snapshot.h)
//
// Stages pass on tensors as the pieces return them: several where a skip connection crosses the cut. A piece must not
// change its input in place. Batch normalisation sees one micro-batch at a time.
//
// Flow:    the part of a batch that data_world() says -> micro-batches -> strategy/pipeline/stage.h -> optimizer/
// Owns:    the devices' threads and a replica per d, or a part of the model per GPU; or this rank's replica
// Threads: one scheduling thread
// Ranks:   every rank makes the same calls. Per micro-batch a rank sends its activations forward and their gradients
//          back; per step 2(d-1)/d K of its stage's parameters over d replicas; in synchronise() its stage's buffers
#include <algorithm>
#include <map>
#include <optional>

#include "lockstep/base/log.h"
#include "lockstep/base/stop.h"
#include "lockstep/base/text.h"
#include "lockstep/collective/gpus.h"
#include "lockstep/error.h"
#include "lockstep/model/parameters.h"
#include "lockstep/model/partial_model.h"
#include "lockstep/strategy/devices/replica_strategy.h"
#include "lockstep/strategy/devices/thread_generator.h"
#include "lockstep/strategy/pipeline/cut.h"
#include "lockstep/strategy/pipeline/gpu_stages.h"
#include "lockstep/strategy/pipeline/stage.h"
#include "lockstep/strategy/pipeline/stage_parameters.h"
#include "lockstep/strategy/strategies.h"

namespace lockstep {
namespace {

void require_possible(const World& world, const StrategyOptions& options) {
  if (options.pipeline.micro_batches < 1)
    throw UsageError({.what = concat("--micro-batches ", options.pipeline.micro_batches), .next = "give at least 1"});
  if (world.size() == 1) return;
  if (options.devices != 1)
    throw UsageError({.what = concat("a pipeline of ranks with ", options.devices, " devices each"),
                      .next = "give --devices-per-worker 1, or one rank with all devices"});
  if (options.clipping.max_norm > 0)
    throw UsageError({.what = "clipping by norm with stages that are processes",
                      .likely = "each stage has the norm of its own gradients only",
                      .next = "leave out --devices-per-worker, so that stages are threads, or clip by value"});
}

std::vector<torch::Tensor> parameters_in(const std::vector<NamedTensor>& tensors) {
  std::vector<torch::Tensor> parameters;
  for (const auto& [name, tensor] : tensors) parameters.push_back(tensor);
  return parameters;
}

void move_to(torch::Device device, const torch::nn::Module& model) {
  for (const auto& tensors : {held(named_parameters(model)), held(named_buffers(model))})
    for (const auto& [name, tensor] : tensors)
      if (tensor.device() != device) put_data(tensor, tensor.to(device));
}

// Devices are numbered over all ranks: either one rank has them all, as threads, or each rank is one.
class Pipeline : public ReplicaStrategy {
 public:
  Pipeline(const World& world, const Task& task, const StrategyOptions& options)
      : ReplicaStrategy(task, {}),
        options_(options),
        ranks_{.all = world, .of_stage = world, .of_replica = world, .back = world},
        schedule_(options.pipeline.schedule),
        micro_batches_(schedule_ == PipelineSchedule::kNaive ? 1 : options.pipeline.micro_batches) {
    require_possible(world, options);
    world.size() > 1 ? become_a_rank() : start_threads();
    usage_ = torch::zeros({stages_ * replica_count_ / world.size(), kUsages}, torch::kFloat64);
    seed_steps(options.seed + 1);
  }

  BatchTotals forward_backward(const Batch& batch) override {
    if (!cut_is_final_) use_measured_cut(batch);
    for (const Replica& replica : replicas_) replica.model->zero_grad();
    if (gpus_) gpus_->begin_step();
    BatchTotals totals{.samples = sum_over(ranks_.of_stage, batch.size())};
    const Stopwatch watch;
    const auto results = run_stages(batch, totals.samples);
    ++step_;
    record(results, watch.seconds());
    for (const StageResult& result : results) totals.mean_loss += result.loss;
    if (gpus_) timed(phases_.exchange, "exchange", [&] { gpus_->sum_gradients(); });
    if (ranks_.all.size() == 1) return totals;
    timed(phases_.exchange, "exchange", [&] {
      parameters_->sum_gradients();
      const torch::Tensor sums = torch::tensor({totals.mean_loss, wants_to_stop() ? 1.0 : 0.0}, torch::kFloat64);
      ranks_.all.all_reduce(sums);
      totals.mean_loss = sums[0].item<double>();
      if (sums[1].item<double>() > 0) agree_to_stop();
    });
    return totals;
  }

  void update() override {
    timed(phases_.update, "update", [&] {
      if (gradients_) gradients_->set(gradients_of(replicas_));
      optimizer().step();
      if (gpus_) gpus_->copy_from_first(GpuStages::Copied::kParameters);
    });
  }

  // Running statistics are of the samples that a replica has seen.
  void synchronise() override {
    if (parameters_) parameters_->broadcast_buffers();
  }

  void restored(std::int64_t step) override {
    follow_model(replicas_);
    if (gpus_) gpus_->copy_from_first(GpuStages::Copied::kBuffersToo);
    step_ = step;
  }

  // Of ranks and GPUs: through all stages, in parts as small as micro-batches. The ranks of a replica all call it with the same
  // data, and the last stage returns the output.
  torch::Tensor forward(const torch::Tensor& data) override {
    if (devices_ && !gpus_) return ReplicaStrategy::forward(data);
    const auto parts = data.tensor_split(std::min(data.size(0), micro_batches_ * replica_count_));
    return gpus_ ? forward_on_gpus(parts) : forward_on_ranks(parts);
  }
  StrategyRanks ranks(const World& world) const override {
    return {.data = ranks_.of_stage, .validation = ranks_.of_stage, .step = world};
  }

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

  int own_stage() const { return static_cast<int>(own_stages_.begin); }  // of a rank
  int own_replicas() const { return devices_ ? replica_count_ : 1; }     // of this process

  torch::Tensor forward_on_gpus(const std::vector<torch::Tensor>& parts) {
    Tensors outputs;
    for (const torch::Tensor& part : parts)
      outputs.push_back(gpus_->forward(in_layout(part, replicas_.front().layout)));
    return torch::cat(outputs);
  }

  torch::Tensor forward_on_ranks(const std::vector<torch::Tensor>& parts) {
    const StageLinks links = message_links(ranks_.of_replica, ranks_.back);
    const auto pieces = pieces_in(pieces_[0], cut_[own_stage()]);
    Tensors outputs;
    for (const torch::Tensor& part : parts) {
      Tensors tensors = links.before ? links.before->receive() : Tensors{in_layout(part, replicas_.front().layout)};
      for (const Piece& piece : pieces) tensors = piece.forward(tensors);
      links.behind ? links.behind->send(tensors) : outputs.push_back(tensors.at(0));
    }
    if (links.behind) links.behind->finish();
    return outputs.empty() ? torch::Tensor() : torch::cat(outputs);
  }

  // Reads --stages, for as many devices as there are in all.
  void read_stages(int devices, std::size_t pieces) {
    const auto option = parse_stages(options_.pipeline.stages, devices, static_cast<int>(pieces));
    stages_ = option.stages;
    replica_count_ = devices / stages_;
    cut_ = option.cut;
    cut_is_final_ = !cut_.empty();
    if (cut_is_final_) log_debug(concat("pipeline stages: ", to_string(cut_)));
  }

  // On cores one model: the replicas share parameters.
  void start_threads() {
    replicas_ = {make_replica(task_, options_)};
    read_stages(options_.devices, pieces_of(task_, model()).size());
    devices_ = make_devices(ranks_.all, options_, stages_);
    own_stages_ = {0, stages_};
    if (devices_->on_gpus()) return start_gpus();
    for (int replica = 1; replica < replica_count_; ++replica) add_replica();
    gradients_ = share_parameters(*devices_, replicas_);
    for (const Replica& replica : replicas_) pieces_.push_back(pieces_of(task_, *replica.model));
  }

  // Until the stages have been measured, they have about as many bytes of parameters each.
  void start_gpus() {
    Replica& whole = replicas_.front();
    whole.layout = options_.layout.value_or(preferred_layout(*whole.model, devices_->where(0)));
    set_layout(*whole.model, whole.layout);
    gpus_ = std::make_shared<GpuStages>(task_, whole.model, *devices_);
    if (!cut_is_final_) cut_ = balanced_cut(bytes_of(pieces_of(task_, *whole.model)), stages_);
    place_on_gpus();
  }

  // The optimizer's state moves with the tensors.
  void place_on_gpus() {
    OptimizerStates states;
    for (const auto& [name, parameter] : named_parameters(model()))
      states[parameter.unsafeGetTensorImpl()] = optimizer().state_of(parameter);
    gpus_->place(cut_);
    renew_optimizer(states, std::make_shared<LocalGradients>(on_each_gpu()));
  }

  // Where two devices are on one GPU, the first of them works.
  OnEachGpu on_each_gpu() {
    std::map<torch::DeviceIndex, int> first;
    for (int i = 0; i < devices_->size(); ++i) first.emplace(devices_->where(i).index(), i);
    return [this, first](const std::function<void(torch::Device)>& work) {
      // `kept` keeps alive what `work` points to, should a device be left behind.
      devices_->run([work, first, kept = replicas_](Device& device) {
        if (first.at(device.where().index()) == device.index()) work(device.where());
      });
    };
  }

  // Of the first replica it has the parameters, and copies of the buffers.
  void add_replica() {
    const auto generator = hold_generator();
    const PartialModel partial(task_.make_model);
    Replica replica = replicas_.front();
    replica.model = partial.make_part(options_.seed, [](torch::nn::Module&) { return std::vector<torch::Tensor>(); });
    const auto own = named_parameters(*replica.model), first = named_parameters(model());
    for (std::size_t i = 0; i < own.size(); ++i) put_data(own[i].tensor, first[i].tensor);
    const auto buffers = named_buffers(*replica.model), first_buffers = named_buffers(model());
    for (std::size_t i = 0; i < buffers.size(); ++i) put_data(buffers[i].tensor, first_buffers[i].tensor.clone());
    replicas_.push_back(replica);
  }

  // Until the stages have been measured, they have about as many bytes of parameters each.
  void become_a_rank() {
    const World& world = ranks_.all;
    const ModulePtr own = make_own_part();
    const int stage = own_stage();
    ranks_.of_stage = *world.split(stage, world.rank());
    ranks_.of_replica = *world.split(world.rank() / stages_, world.rank());
    ranks_.back = world.device().is_cpu() ? ranks_.of_replica : *world.split(world.rank() / stages_, world.rank());
    move_to(world.device(), *own);
    const Layout layout = options_.layout.value_or(preferred_layout(*own, world.device()));
    set_layout(*own, layout);
    replicas_ = {{.model = own, .layout = layout, .optimizer = nullptr}};
    pieces_ = {pieces_of(task_, model())};
    auto tensors = named_parameters(model());
    for (auto& buffer : named_buffers(model())) tensors.push_back(buffer);
    require_same_model(world, tensors);
    share_out({});
    parameters_->broadcast();
  }

  ModulePtr make_own_part() {
    const auto generator = hold_generator();
    const PartialModel partial(task_.make_model);
    const auto pieces = pieces_of(task_, partial.skeleton());
    read_stages(ranks_.all.size(), pieces.size());
    if (!cut_is_final_) cut_ = balanced_cut(bytes_of(pieces), stages_);
    const int stage = ranks_.all.rank() % stages_;
    own_stages_ = {stage, stage + 1};
    return partial.make_part(options_.seed, [&](torch::nn::Module& skeleton) {
      return tensors_of(stage_tensors(skeleton, pieces, cut_), stage);
    });
  }

  // Makes what a rank has beside its tensors. states: of the optimizer, before its first step in this arrangement.
  void share_out(const OptimizerStates& states) {
    parameters_.emplace(stage_tensors(model(), pieces_[0], cut_), ranks_);
    renew_optimizer(states, nullptr);
  }

  // gradients: where it gets them; null: .grad
  void renew_optimizer(const OptimizerStates& states, const std::shared_ptr<GradientSource>& gradients) {
    const auto own = held(named_parameters(model()));
    replicas_.front().optimizer = make_optimizer(parameters_in(own), update_options(options_));
    if (gradients) optimizer().attach(gradients);
    for (const auto& [name, parameter] : own)
      if (const auto found = states.find(parameter.unsafeGetTensorImpl()); found != states.end())
        if (!found->second.empty()) optimizer().set_state(parameter, found->second);
  }

  void use_measured_cut(const Batch& batch) {
    const Cut before = std::exchange(cut_, gpus_      ? cut_of_gpus(batch)
                                           : devices_ ? cut_of_threads(batch)
                                                      : cut_of_ranks(batch));
    cut_is_final_ = true;
    log_debug(concat("pipeline stages: ", to_string(cut_)));
    if ((devices_ && !gpus_) || to_string(before) == to_string(cut_)) return;
    const auto staged = [&](const Cut& cut) { return stage_tensors(model(), pieces_[0], cut); };
    const double lr = optimizer().param_groups().front().options().get_lr();
    if (gpus_)
      place_on_gpus();
    else
      share_out(move_tensors(staged(before), staged(cut_), ranks_, optimizer()));
    set_learning_rate(optimizer(), lr);
  }

  torch::Tensor first_micro_batch(const Batch& batch) const {
    const std::int64_t samples = std::max<std::int64_t>(1, batch.size() / (micro_batches_ * own_replicas()));
    return in_layout(batch.data.slice(0, 0, samples), replicas_.front().layout);
  }

  Cut cut_of_threads(const Batch& batch) {
    Tensors tensors = {first_micro_batch(batch)};
    return balanced_cut(measure_pieces(pieces_[0], model(), tensors), stages_);
  }

  // The GPUs of the first replica measure their pieces one after the other.
  Cut cut_of_gpus(const Batch& batch) {
    const auto tensors = std::make_shared<Tensors>(Tensors{first_micro_batch(batch).to(devices_->where(0))});
    const auto costs = std::make_shared<std::vector<double>>();
    for (int stage = 0; stage < stages_; ++stage)
      devices_->run([=, gpus = gpus_](Device& device) {
        if (device.index() != stage) return;
        *tensors = received_on(device.where(), *tensors);
        const auto seconds = measure_pieces(gpus->pieces(stage), gpus->part(stage), *tensors);
        costs->insert(costs->end(), seconds.begin(), seconds.end());
      });
    return balanced_cut(*costs, stages_);
  }

  // The stages of the first replica measure their pieces one after the other.
  Cut cut_of_ranks(const Batch& batch) {
    const torch::Tensor costs = torch::zeros({static_cast<std::int64_t>(pieces_[0].size())}, torch::kFloat64);
    if (ranks_.of_stage.rank() == 0) {
      const StageLinks links = message_links(ranks_.of_replica, ranks_.back);
      const Range& own = cut_[own_stage()];
      Tensors tensors = links.before ? links.before->receive() : Tensors{first_micro_batch(batch)};
      const auto seconds = measure_pieces(pieces_in(pieces_[0], own), model(), tensors);
      costs.slice(0, own.begin, own.end).copy_(torch::tensor(seconds, torch::kFloat64));
      if (links.behind) {
        links.behind->send(tensors);
        links.behind->finish();
      }
    }
    ranks_.all.all_reduce(costs);
    const auto* cost = costs.const_data_ptr<double>();
    return balanced_cut({cost, cost + costs.numel()}, stages_);
  }

  // Runs every stage of this process, all at the same time.
  IntVector<StageResult> run_stages(const Batch& batch, std::int64_t samples) {
    const auto work = std::make_shared<const IntVector<StageWork>>(work_of_stages(batch, samples));
    if (!devices_) {
      const ThreadGenerator generator((*work)[0].seed);
      const StageResult result = run_stage(task_, (*work)[0], message_links(ranks_.of_replica, ranks_.back));
      wait_for_device(ranks_.all.device(), options_.timeout);  // times are those of the work
      return {result};
    }
    std::size_t most = 1;  // micro-batches of a replica
    for (const StageWork& each : *work) most = std::max(most, each.micro_batches.elements().size());
    const auto links = thread_links(devices_->size(), stages_, most);
    const auto results = std::make_shared<IntVector<StageResult>>(devices_->size());
    // `models` and `gpus` keep alive what the pieces point to, should a device be left behind.
    devices_->run([work, links, results, task = task_, models = replicas_, gpus = gpus_](Device& device) {
      (*results)[device.index()] = run_stage(task, (*work)[device.index()], links(device));
    });
    return *results;
  }

  // In the order of the devices: the stages of the first replica of this process, then those of the next.
  IntVector<StageWork> work_of_stages(const Batch& batch, std::int64_t samples) {
    const std::uint64_t seed = seed_of(options_.seed + 1, static_cast<int>(step_));
    const int first_replica = ranks_.of_stage.rank();
    IntVector<StageWork> work;
    for (const Batch& part : parts_of_replicas(batch)) {
      const int replica = work.size() / static_cast<int>(own_stages_.size());
      IntVector<Batch> micro_batches = micro_batches_of(part, micro_batches_);
      for (Batch& each : micro_batches) each.data = in_layout(each.data, replicas_.front().layout);
      for (auto stage = static_cast<int>(own_stages_.begin); stage < own_stages_.end; ++stage)
        work.push_back({.pieces = gpus_ ? gpus_->pieces(work.size()) : pieces_in(pieces_[replica], cut_[stage]),
                        .micro_batches = micro_batches,
                        .steps = steps_of_stage(schedule_, stage, stages_, micro_batches.size()),
                        .samples = samples,
                        .seed = seed_of(seed, first_replica + replica),
                        .first_piece = static_cast<int>(cut_[stage].begin),
                        .device = devices_ ? devices_->where(work.size()) : ranks_.all.device(),
                        .timeout = options_.timeout,
                        .waits = gpus_ != nullptr,
                        .is_alone = gpus_ || !devices_});
    }
    return work;
  }

  // A GPU gets only what it needs: the first one of a replica the data, the last one the targets.
  std::vector<Batch> parts_of_replicas(const Batch& batch) {
    if (!gpus_) return parts_of(batch, own_replicas());
    const std::vector<Batch> copied = parts_for_devices(batch);
    std::vector<Batch> parts;
    for (std::size_t i = 0; i < copied.size(); i += 2) parts.push_back({copied[i].data, copied[i + 1].target});
    return parts;
  }

  std::vector<CopiedBatch> start_copies(const Batch& batch) const override {
    std::vector<CopiedBatch> copies;
    const auto copy = [&](int device, const Batch& part) {
      const torch::Device gpu = devices_->where(device);
      copies.push_back(on_device(gpu, [&] { return start_copy(part, copy_stream(gpu)); }));
    };
    for (int replica = 0; replica < replica_count_; ++replica) {
      const Batch part = part_of(batch, replica, replica_count_);
      copy(replica * stages_, {part.data, part.target.slice(0, 0, 0)});
      copy((replica + 1) * stages_ - 1, {part.data.slice(0, 0, 0), part.target});
    }
    return copies;
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

  StrategyOptions options_;
  PipelineRanks ranks_;  // all three are the world where it has one rank
  PipelineSchedule schedule_;
  std::int64_t micro_batches_;
  IntVector<std::vector<Piece>> pieces_;  // of each replica of this process
  int stages_ = 0;
  int replica_count_ = 0;                      // of all ranks
  Range own_stages_;                           // that this process has, of each of its replicas
  Cut cut_;                                    // of threads: empty until it is final
  bool cut_is_final_ = false;                  // named, or the first batch has been measured
  std::int64_t step_ = 0;                      // of which random numbers are those of the next batch
  std::shared_ptr<LocalGradients> gradients_;  // of threads on cores
  std::shared_ptr<GpuStages> gpus_;            // of threads on GPUs
  std::optional<StageParameters> parameters_;  // of ranks
  torch::Tensor usage_;                        // [device of this process][Usage]
};

}  // namespace

std::unique_ptr<Strategy> make_pipeline(const World& world, const Task& task, const StrategyOptions& options) {
  return std::make_unique<Pipeline>(world, task, options);
}

}  // namespace lockstep
