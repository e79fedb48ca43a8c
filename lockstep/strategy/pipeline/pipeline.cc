// SPDX-License-Identifier: Apache-2.0
#include "lockstep/strategy/pipeline/pipeline.h"

#include <algorithm>

#include "lockstep/base/log.h"
#include "lockstep/base/require.h"
#include "lockstep/base/text.h"
#include "lockstep/data/loader/random.h"
#include "lockstep/model/parameters.h"
#include "lockstep/model/partial_model.h"
#include "lockstep/strategy/devices/thread_generator.h"

namespace lockstep {
namespace {

int micro_batches_in(const PipelineOptions& options) {
  return options.schedule == PipelineSchedule::kNaive ? 1 : static_cast<int>(options.micro_batches);
}

}  // namespace

Pipeline::Pipeline(const World& all, const Task& task, const StrategyOptions& options)
    : ReplicaStrategy(task, {}),
      options_(options),
      all_(all),
      of_stage_(all),
      micro_batches_(micro_batches_in(options.pipeline)) {
  require(micro_batches_ >= 1, concat("--micro-batches ", micro_batches_), "give at least 1");
}

void Pipeline::read_stages(int devices, const std::vector<Piece>& pieces) {
  const auto option = parse_stages(options_.pipeline.stages, devices, to_int(pieces.size()));
  stages_ = option.stages;
  replica_count_ = devices / stages_;
  cut_is_final_ = !option.cut.empty();
  cut_ = cut_is_final_ ? option.cut : balanced_cut(bytes_of(pieces), stages_);
  if (cut_is_final_) log_debug(concat("pipeline stages: ", to_string(cut_)));
  usage_ = torch::zeros({devices / all_.size(), kUsages}, torch::kFloat64);
}

BatchTotals Pipeline::forward_backward(const Batch& batch) {
  if (!cut_is_final_) use_measured_cut(batch);
  begin_step();
  IntVector<IntVector<int64_t>> counts(replica_count_ / of_stage_.size());
  int64_t samples = 0;
  for (int i = 0; i < counts.size(); ++i)
    for (const Batch& each : micro_batches_of(part_of(batch, i, counts.size()), micro_batches_))
      samples += counts[i].emplace_back(samples_of(task_, each));
  BatchTotals totals{.samples = sum_over(of_stage_, samples)};
  totals.examples = sum_examples(of_stage_, task_, batch, totals.samples);
  const Stopwatch watch;
  const auto results = run_stages(batch, counts, totals.samples);
  ++step_;
  record(results, watch.seconds());
  for (const StageResult& result : results) totals.mean_loss += result.loss;
  in_phase(Phase::kExchange, [&] { exchange(totals); });
  return totals;
}

void Pipeline::use_measured_cut(const Batch& batch) {
  const int64_t samples = std::max<int64_t>(1, batch.size() / (micro_batches_ * replica_count_ / of_stage_.size()));
  IntVector<Batch> first{batch.rows(0, samples)};
  set_layouts(first);
  const auto seconds = seconds_of_pieces(first[0]);
  const Cut measured = balanced_cut(seconds, stages_);
  cut_is_final_ = true;
  log_debug(concat("pipeline stages: ", to_string(measured)));
  if (measured == cut_) return;
  const double lr = learning_rate();
  move_to(measured);
  set_learning_rate(optimizer(), lr);
}

StageWork Pipeline::work_of(int replica, int stage, const Batch& part, IntVector<int64_t> counts,
                            int64_t samples) const {
  IntVector<Batch> micro_batches;
  for (int i = 0; const Batch& each : micro_batches_of(part, micro_batches_))
    if (counts[i++] > 0) micro_batches.push_back(each);
  std::erase(counts, 0);
  if (stage == 0) set_layouts(micro_batches);
  return {.micro_batches = micro_batches,
          .counts = counts,
          .steps = steps_of_stage(options_.pipeline.schedule, stage, stages_, micro_batches.size()),
          .samples = samples,
          .seed = mix_seed(mix_seed(options_.seed + 1, step_), replica),
          .first_piece = to_int(cut_[stage].begin),
          .timeout = options_.timeout};
}

void Pipeline::renew_optimizer(const OptimizerStates& states, const std::shared_ptr<GradientSource>& gradients) {
  const Tensors parameters = tensors_of(held(named_parameters(model())));
  replicas_.front().optimizer = make_optimizer(parameters, update_options(options_));
  if (gradients) optimizer().attach(gradients);
  for (const Tensor& parameter : parameters)
    if (const auto found = states.find(parameter.unsafeGetTensorImpl()); found != states.end())
      if (!found->second.empty()) optimizer().set_state(parameter, found->second);
}

void Pipeline::set_layouts(IntVector<Batch>& batches) const {
  for (Batch& each : batches) each.data = in_layout(each.data, replicas_.front().layout);
}

IntVector<Batch> Pipeline::in_micro_batches(const Batch& batch) const {
  IntVector<Batch> parts = micro_batches_of(batch, micro_batches_ * replica_count_);
  set_layouts(parts);
  return parts;
}

void Pipeline::record(const IntVector<StageResult>& results, double seconds) {
  phases_.backward += seconds;  // forward and backward take turns
  auto usage = usage_.accessor<double, 2>();
  for (int i = 0; i < results.size(); ++i) {
    usage[i][kBusy] += results[i].busy;
    usage[i][kWall] += seconds;
    usage[i][kInFlight] = std::max(usage[i][kInFlight], to_double(results[i].in_flight));
    usage[i][kBytes] = std::max(usage[i][kBytes], to_double(results[i].memory));
  }
}

// bubble: the share of the devices' time in forward and backward that they waited; beside it what it would be if all
// p stages took the same time for each of m micro-batches, and nothing else any: (p-1)/(m+p-1).
Report Pipeline::report() const {
  const Tensor of_devices = all_.all_gather(usage_).flatten(0, 1);
  const Tensor seconds = of_devices.sum(0);
  Report report = {{"stages", stages_},
                   {"replicas", replica_count_},
                   {"micro_batches", micro_batches_},
                   {"bubble", 1 - (seconds[kBusy] / seconds[kWall]).item<double>()},
                   {"ideal_bubble", (stages_ - 1) / to_double(micro_batches_ + stages_ - 1)}};
  const Tensor of_stages = of_devices.view({replica_count_, stages_, kUsages}).amax(0);
  for (int stage = 0; stage < stages_; ++stage) {
    report.emplace_back(concat("stage_", stage, "_in_flight"), of_stages[stage][kInFlight].item<double>());
    report.emplace_back(concat("stage_", stage, "_bytes"), of_stages[stage][kBytes].item<double>());
  }
  return report;
}

// Each machine has its share of the stages, with replicas of none. A stage keeps the micro-batches that are in flight.
HeldBytes bytes_of_pipeline(const PlannedRun& run) {
  const PipelineOptions& options = run.options.pipeline;
  const int micro_batches = micro_batches_in(options);
  double in_flight = 0;  // on a stage, in the mean
  for (int stage = 0; stage < run.stages; ++stage)
    in_flight += to_double(most_in_flight(options.schedule, stage, run.stages, micro_batches)) / run.stages;
  const double processes = run.machines > 1 ? run.devices : 1, machines = run.machines;
  return {.processes = processes * run.process,
          .parameters = run.parameters / machines,
          .state = run.state / machines,
          .gradients = run.parameters / machines,
          .activations = run.activations * in_flight / micro_batches};
}

std::unique_ptr<Strategy> make_pipeline(const World& world, const Task& task, const StrategyOptions& options) {
  return world.size() == 1 ? make_local_pipeline(world, task, options) : make_rank_pipeline(world, task, options);
}

}  // namespace lockstep
