#include "lockstep/strategy/pipeline/pipeline.h"

#include <algorithm>
#include <optional>

#include "lockstep/base/log.h"
#include "lockstep/base/text.h"
#include "lockstep/deadline.h"
#include "lockstep/error.h"
#include "lockstep/strategy/devices/thread_generator.h"
#include "lockstep/strategy/pipeline/channel.h"
#include "lockstep/strategy/pipeline/pipeline_cut.h"
#include "lockstep/strategy/pipeline/pipeline_processes.h"
#include "lockstep/strategy/pipeline/pipeline_stage.h"
#include "lockstep/towers.h"

namespace lockstep {
namespace {

int stages_in(const Task& task, const StrategyOptions& options, const Replica& replica) {
  return parse_stages(options.pipeline.stages, options.devices,
                      static_cast<int>(pieces_of(task, *replica.model).size()))
      .stages;
}

// Between a stage and the next, as threads.
struct Channels {
  explicit Channels(std::size_t capacity) : forward(capacity), backward(capacity) {}
  Channel<Tensors> forward;
  Channel<Tensors> backward;
};

class ChannelLink : public StageLink {
 public:
  ChannelLink(Device& device, Channel<Tensors>& out, Channel<Tensors>& in) : device_(device), out_(out), in_(in) {}
  void send(Tensors tensors) override { out_.send(device_, std::move(tensors)); }
  Tensors receive() override { return in_.receive(device_); }

 private:
  Device& device_;
  Channel<Tensors>& out_;
  Channel<Tensors>& in_;
};

struct DeviceWork {
  StageWork stage;
  std::shared_ptr<Channels> before;
  std::shared_ptr<Channels> behind;
};

StageResult run_on(Device& device, const Task& task, const DeviceWork& work) {
  std::optional<ChannelLink> before, behind;
  if (work.before) before.emplace(device, work.before->backward, work.before->forward);
  if (work.behind) behind.emplace(device, work.behind->forward, work.behind->backward);
  return run_stage(task, work.stage, {.before = before ? &*before : nullptr, .behind = behind ? &*behind : nullptr},
                   device.generator());
}

class Pipeline : public Strategy {
 public:
  Pipeline(const World& world, const Task& task, const StrategyOptions& options)
      : task_(task),
        schedule_(options.pipeline.schedule),
        micro_batches_(schedule_ == PipelineSchedule::kNaive ? 1 : options.pipeline.micro_batches),
        replicas_(make_replicas(1, task, options)),
        stages_(stages_in(task, options, replicas_.front())),
        devices_({.count = options.devices, .cores = world.cores(), .timeout = options.timeout, .teams = stages_}) {
    if (micro_batches_ < 1)
      throw UsageError({.what = concat("--micro-batches ", micro_batches_), .next = "give at least 1"});
    if (replica_count() > 1) replicas_ = make_replicas(replica_count(), task, options);
    gradients_ = share_parameters(devices_, replicas_);
    for (const Replica& replica : replicas_) pieces_.push_back(pieces_of(task, *replica.model));
    use(parse_stages(options.pipeline.stages, options.devices, static_cast<int>(pieces_[0].size())).cut);
    seed_steps(options.seed + 1);
  }

  BatchTotals forward_backward(const Batch& batch) override {
    if (cut_.empty()) use(balanced_cut(measure_pieces(pieces_[0], model(), first_micro_batch(batch)), stages_));
    for (const Replica& replica : replicas_) replica.model->zero_grad();
    const Stopwatch watch;
    const auto results = run_stages_on(batch);
    record(results, watch.seconds());
    BatchTotals totals{.samples = batch.size()};
    for (const StageResult& result : results) totals.mean_loss += result.loss;
    return totals;
  }

  void update() override {
    const Stopwatch watch;
    gradients_->set(gradients_of(replicas_));
    replicas_.front().optimizer->step();
    phases_.update += watch.seconds();
  }

  torch::Tensor forward(const torch::Tensor& data) override { return replicas_.front().forward(task_, data); }
  torch::nn::Module& model() override { return *replicas_.front().model; }
  Optimizer& optimizer() override { return *replicas_.front().optimizer; }
  const PhaseTimes& phases() const override { return phases_; }
  void restored(std::int64_t) override { follow_model(replicas_); }
  std::vector<std::string> devices() const override { return devices_.names(); }

  // bubble: the share of the devices' time in forward and backward that they waited; beside it what it would be if all
  // stages took the same time.
  Report report() const override {
    Report report = {{"stages", stages_},
                     {"replicas", replica_count()},
                     {"micro_batches", static_cast<double>(micro_batches_)},
                     {"bubble", 1 - busy_ / (wall_ * devices_.size())},
                     {"ideal_bubble", ideal_bubble(stages_, static_cast<int>(micro_batches_))}};
    for (std::size_t stage = 0; stage < memory_.size(); ++stage) {
      report.emplace_back(concat("stage_", stage, "_in_flight"), in_flight_[stage]);
      report.emplace_back(concat("stage_", stage, "_bytes"), static_cast<double>(memory_[stage]));
    }
    return report;
  }

 private:
  int replica_count() const { return devices_.size() / stages_; }

  void use(const Cut& cut) {
    cut_ = cut;
    if (!cut.empty()) log_debug(concat("pipeline stages: ", to_string(cut)));
  }

  torch::Tensor first_micro_batch(const Batch& batch) const {
    const std::int64_t samples = std::max<std::int64_t>(1, batch.size() / (micro_batches_ * replica_count()));
    return in_layout(batch.data.slice(0, 0, samples), replicas_.front().layout);
  }

  std::vector<StageResult> run_stages_on(const Batch& batch) {
    const auto work = std::make_shared<std::vector<DeviceWork>>();
    const std::uint64_t seed = draw_seed();
    for (const Batch& part : parts_of(batch, replica_count())) add_work(*work, part, batch.size(), seed);
    const auto results = std::make_shared<std::vector<StageResult>>(work->size());
    devices_.run([work, results, task = task_, models = replicas_](Device& device) {
      const auto i = static_cast<std::size_t>(device.index());
      (*results)[i] = run_on(device, task, (*work)[i]);
    });
    return *results;
  }

  // The work of each stage of the next replica.
  void add_work(std::vector<DeviceWork>& work, const Batch& part, std::int64_t samples, std::uint64_t seed) const {
    const std::size_t replica = work.size() / static_cast<std::size_t>(stages_);
    std::vector<Batch> batches = micro_batches_of(part, micro_batches_);
    for (Batch& each : batches) each.data = in_layout(each.data, replicas_[replica].layout);
    std::shared_ptr<Channels> before;
    for (int stage = 0; stage < stages_; ++stage) {
      const Range range = cut_[static_cast<std::size_t>(stage)];
      const auto pieces = pieces_[replica].begin();
      const bool last = stage + 1 == stages_;
      const auto behind = last ? nullptr : std::make_shared<Channels>(std::max<std::size_t>(batches.size(), 1));
      work.push_back({.stage = {.pieces = {pieces + range.begin, pieces + range.end},
                                .micro_batches = batches,
                                .steps = steps_of_stage(schedule_, stage, stages_, static_cast<int>(batches.size())),
                                .samples = samples,
                                .seed = seed_of(seed, static_cast<int>(replica)),
                                .first_piece = static_cast<int>(range.begin)},
                      .before = before,
                      .behind = behind});
      before = behind;
    }
  }

  void record(const std::vector<StageResult>& results, double seconds) {
    wall_ += seconds;
    memory_.resize(static_cast<std::size_t>(stages_));
    in_flight_.resize(memory_.size());
    for (std::size_t i = 0; i < results.size(); ++i) {
      const std::size_t stage = i % memory_.size();
      busy_ += results[i].busy;
      memory_[stage] = std::max(memory_[stage], results[i].memory);
      in_flight_[stage] = std::max(in_flight_[stage], results[i].in_flight);
    }
    phases_.backward += seconds;  // forward and backward take turns
  }

  Task task_;
  PipelineSchedule schedule_;
  std::int64_t micro_batches_;
  Replicas replicas_;
  std::shared_ptr<SummedGradients> gradients_;
  int stages_;
  Devices devices_;
  std::vector<std::vector<Stage>> pieces_;  // of each replica
  Cut cut_;                                 // empty until the first batch has been measured
  double wall_ = 0;
  double busy_ = 0;
  std::vector<std::int64_t> memory_;  // of each stage
  std::vector<int> in_flight_;
  PhaseTimes phases_;
};

}  // namespace

std::unique_ptr<Strategy> make_pipeline(const World& world, const Task& task, const StrategyOptions& options) {
  if (world.size() > 1) return make_pipeline_of_processes(world, task, options);
  return std::make_unique<Pipeline>(world, task, options);
}

}  // namespace lockstep
