#include "lockstep/strategy/pipeline/pipeline_processes.h"

#include <algorithm>
#include <unordered_map>

#include "lockstep/base/text.h"
#include "lockstep/deadline.h"
#include "lockstep/error.h"
#include "lockstep/model/parameters.h"
#include "lockstep/strategy/pipeline/pipeline_cut.h"
#include "lockstep/strategy/pipeline/pipeline_stage.h"
#include "lockstep/strategy/pipeline/tensor_messages.h"
#include "lockstep/towers.h"

namespace lockstep {
namespace {

constexpr int kForward = 0;  // tags
constexpr int kBackward = 1;
constexpr int kState = 2;

class MessageLink : public StageLink {
 public:
  MessageLink(const World& world, int peer, int tag_out, int tag_in)
      : world_(world), peer_(peer), tag_in_(tag_in), sender_(world, peer, tag_out) {}
  void send(Tensors tensors) override { sender_.send(tensors); }
  Tensors receive() override { return receive_tensors(world_, peer_, tag_in_); }
  void finish() { sender_.finish(); }

 private:
  World world_;
  int peer_;
  int tag_in_;
  TensorSender sender_;
};

const StrategyOptions& checked(const StrategyOptions& options) {
  if (options.devices != 1)
    throw UsageError({.what = concat("a pipeline of ranks with ", options.devices, " devices each"),
                      .next = "give --devices-per-worker 1, or one rank with all devices"});
  if (options.clipping.max_norm > 0)
    throw UsageError({.what = "clipping by norm with stages that are processes",
                      .likely = "each stage has the norm of its own gradients only",
                      .next = "leave out --devices-per-worker, so that stages are threads, or clip by value"});
  return options;
}

class PipelineOfProcesses : public Strategy {
 public:
  PipelineOfProcesses(const World& world, const Task& task, const StrategyOptions& options)
      : world_(world),
        task_(task),
        schedule_(checked(options).pipeline.schedule),
        micro_batches_(schedule_ == PipelineSchedule::kNaive ? 1 : options.pipeline.micro_batches),
        replica_(make_replica(task, options, world.device())),
        pieces_(pieces_of(task, model())),
        stages_(parse_stages(options.pipeline.stages, world.size(), static_cast<int>(pieces_.size())).stages),
        stage_(world.rank() % stages_),
        over_replicas_(*world.split(stage_, world.rank())),
        over_stages_(*world.split(world.rank() / stages_, world.rank())) {
    auto tensors = named_parameters(model());
    for (auto& buffer : named_buffers(model())) tensors.push_back(buffer);
    require_same_model(world, tensors);
    broadcast_tensors(world, tensors);
    use(parse_stages(options.pipeline.stages, world.size(), static_cast<int>(pieces_.size())).cut);
    seed_steps(options.seed + 1);
  }

  BatchTotals forward_backward(const Batch& batch) override {
    if (cut_.empty()) use(agreed_cut(batch));
    model().zero_grad();
    const std::int64_t samples = sum_over(over_replicas_, batch.size());
    const Stopwatch watch;
    const StageResult result = run_own_stage(batch, samples);
    record(result, watch.seconds());
    const Stopwatch exchange;
    sum_gradients();
    const torch::Tensor loss = torch::tensor({result.loss}, torch::kFloat64);
    world_.all_reduce(loss);
    phases_.exchange += exchange.seconds();
    return {.samples = samples, .mean_loss = loss.item<double>()};
  }

  void update() override {
    const Stopwatch watch;
    replica_.optimizer->step();
    phases_.update += watch.seconds();
  }

  void synchronise() override {
    if (cut_.empty()) return;
    for (int stage = 0; stage < stages_; ++stage) broadcast_tensors(world_, tensors_of(stage), stage);
    collect_optimizer_state();
  }

  World data_world(const World&) const override { return over_replicas_; }
  torch::Tensor forward(const torch::Tensor& data) override { return replica_.forward(task_, data); }
  torch::nn::Module& model() override { return *replica_.model; }
  Optimizer& optimizer() override { return *replica_.optimizer; }
  const PhaseTimes& phases() const override { return phases_; }

  Report report() const override {
    const torch::Tensor mine =
        torch::tensor({busy_, wall_, static_cast<double>(in_flight_), static_cast<double>(memory_)}, torch::kFloat64);
    const torch::Tensor all = world_.all_gather(mine);
    Report report = {{"stages", stages_},
                     {"replicas", world_.size() / stages_},
                     {"micro_batches", static_cast<double>(micro_batches_)},
                     {"bubble", 1 - all.select(1, 0).sum().item<double>() / all.select(1, 1).sum().item<double>()},
                     {"ideal_bubble", ideal_bubble(stages_, static_cast<int>(micro_batches_))}};
    for (int stage = 0; stage < stages_; ++stage) {
      report.emplace_back(concat("stage_", stage, "_in_flight"), all[stage][2].item<double>());
      report.emplace_back(concat("stage_", stage, "_bytes"), all[stage][3].item<double>());
    }
    return report;
  }

 private:
  static std::int64_t sum_over(const World& world, std::int64_t value) {
    const torch::Tensor sum = torch::tensor({value});
    world.all_reduce(sum);
    return sum.item<std::int64_t>();
  }

  // Rank 0's measurement decides.
  Cut agreed_cut(const Batch& batch) {
    torch::Tensor costs = torch::zeros({static_cast<std::int64_t>(pieces_.size())}, torch::kFloat64);
    if (world_.rank() == 0) {
      const std::int64_t samples = std::max<std::int64_t>(1, batch.size() / micro_batches_);
      costs =
          torch::tensor(measure_pieces(pieces_, model(), in_layout(batch.data.slice(0, 0, samples), replica_.layout)),
                        torch::kFloat64);
    }
    world_.broadcast(costs);
    const auto* cost = costs.const_data_ptr<double>();
    return balanced_cut({cost, cost + costs.numel()}, stages_);
  }

  void use(const Cut& cut) {
    cut_ = cut;
    if (cut.empty()) return;
    parameters_ = parameters_of_stages(pieces_, cut);
    std::unordered_map<const void*, int> users;
    for (int stage = 0; stage < stages_; ++stage)
      for (const torch::Tensor& parameter : parameters_of(pieces_in(stage)))
        if (++users[parameter.unsafeGetTensorImpl()] == 2) tied_.push_back(parameter);
  }

  std::vector<Stage> pieces_in(int stage) const {
    const Range range = cut_[static_cast<std::size_t>(stage)];
    return {pieces_.begin() + range.begin, pieces_.begin() + range.end};
  }

  StageResult run_own_stage(const Batch& batch, std::int64_t samples) {
    StageWork work{.pieces = pieces_in(stage_), .micro_batches = micro_batches_of(batch, micro_batches_)};
    for (Batch& each : work.micro_batches) each.data = in_layout(each.data, replica_.layout);
    work.steps = steps_of_stage(schedule_, stage_, stages_, static_cast<int>(work.micro_batches.size()));
    work.samples = samples;
    work.seed = seed_of(draw_seed(), world_.rank() / stages_);
    work.first_piece = static_cast<int>(cut_[static_cast<std::size_t>(stage_)].begin);
    MessageLink before(over_stages_, stage_ - 1, kBackward, kForward);
    MessageLink behind(over_stages_, stage_ + 1, kForward, kBackward);
    ThreadGenerator generator(work.seed);
    const StageResult result = run_stage(
        task_, work, {.before = stage_ > 0 ? &before : nullptr, .behind = stage_ + 1 < stages_ ? &behind : nullptr},
        generator);
    before.finish();
    behind.finish();
    return result;
  }

  void sum_gradients() {
    if (over_replicas_.size() > 1) sum_own_gradients();
    for (torch::Tensor& parameter : tied_) sum_tied_gradient(parameter);
  }

  bool is_tied(const torch::Tensor& parameter) const {
    return std::any_of(tied_.begin(), tied_.end(), [&](const torch::Tensor& each) { return each.is_same(parameter); });
  }

  // A parameter without a gradient on some replica counts as zero there; one without on all of them keeps none.
  void sum_own_gradients() {
    auto& parameters = parameters_[static_cast<std::size_t>(stage_)];
    const torch::Tensor defined = torch::zeros({static_cast<std::int64_t>(parameters.size())}, torch::kInt64);
    for (std::size_t i = 0; i < parameters.size(); ++i)
      defined[static_cast<std::int64_t>(i)] = parameters[i].grad().defined() ? 1 : 0;
    over_replicas_.all_reduce(defined);
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      if (defined[static_cast<std::int64_t>(i)].item<std::int64_t>() == 0 || is_tied(parameters[i])) continue;
      over_replicas_.all_reduce(gradient_or_zeros(parameters[i]));
    }
  }

  // Over all ranks: those that do not use it give zeros and forget the sum.
  void sum_tied_gradient(torch::Tensor& parameter) {
    const auto mine = parameters_of(pieces_in(stage_));
    const bool used =
        std::any_of(mine.begin(), mine.end(), [&](const torch::Tensor& each) { return each.is_same(parameter); });
    world_.all_reduce(gradient_or_zeros(parameter));
    if (!used) parameter.mutable_grad() = torch::Tensor();
  }

  static torch::Tensor gradient_or_zeros(torch::Tensor& parameter) {
    if (!parameter.grad().defined())
      parameter.mutable_grad() = torch::zeros_like(parameter, parameter.options().requires_grad(false));
    return parameter.grad();
  }

  // Parameters and buffers of a stage; a tied parameter has the same values wherever it is used.
  std::vector<NamedTensor> tensors_of(int stage) const {
    std::vector<NamedTensor> tensors;
    for (const torch::Tensor& parameter : parameters_[static_cast<std::size_t>(stage)])
      tensors.push_back({"parameter", parameter});
    for (const Stage& piece : pieces_in(stage))
      for (const torch::nn::Module* module : piece.modules)
        for (const torch::Tensor& buffer : module->buffers()) tensors.push_back({"buffer", buffer});
    return tensors;
  }

  // The other stages' ranks of the first replica send theirs to rank 0.
  void collect_optimizer_state() {
    if (world_.rank() >= stages_) return;
    if (stage_ > 0) {
      TensorSender sender(over_stages_, 0, kState);
      for (const torch::Tensor& parameter : parameters_[static_cast<std::size_t>(stage_)])
        sender.send(values_of(optimizer().state_of(parameter)));
      sender.finish();
      return;
    }
    for (int stage = 1; stage < stages_; ++stage)
      for (const torch::Tensor& parameter : parameters_[static_cast<std::size_t>(stage)])
        optimizer().set_state(parameter, state_from(receive_tensors(over_stages_, stage, kState)));
  }

  // Names and values in turn: a name as its bytes.
  static Tensors values_of(const Optimizer::StateTensors& state) {
    Tensors values;
    for (const auto& [name, tensor] : state) {
      values.push_back(torch::tensor(std::vector<std::uint8_t>(name.begin(), name.end()), torch::kUInt8));
      values.push_back(tensor);
    }
    return values;
  }

  static Optimizer::StateTensors state_from(const Tensors& values) {
    Optimizer::StateTensors state;
    for (std::size_t i = 0; i < values.size(); i += 2) {
      const auto* name = values[i].const_data_ptr<std::uint8_t>();
      state[std::string(name, name + values[i].numel())] = values[i + 1];
    }
    return state;
  }

  void record(const StageResult& result, double seconds) {
    busy_ += result.busy;
    wall_ += seconds;
    memory_ = std::max(memory_, result.memory);
    in_flight_ = std::max(in_flight_, result.in_flight);
    phases_.backward += seconds;  // forward and backward take turns
  }

  World world_;
  Task task_;
  PipelineSchedule schedule_;
  std::int64_t micro_batches_;
  Replica replica_;
  std::vector<Stage> pieces_;
  int stages_;
  int stage_;
  World over_replicas_;                                 // the ranks with this stage
  World over_stages_;                                   // the ranks of this replica: stage s is its rank s
  Cut cut_;                                             // empty until the first batch has been measured
  std::vector<std::vector<torch::Tensor>> parameters_;  // of each stage
  std::vector<torch::Tensor> tied_;                     // used by several stages
  double busy_ = 0;
  double wall_ = 0;
  std::int64_t memory_ = 0;
  int in_flight_ = 0;
  PhaseTimes phases_;
};

}  // namespace

std::unique_ptr<Strategy> make_pipeline_of_processes(const World& world, const Task& task,
                                                     const StrategyOptions& options) {
  return std::make_unique<PipelineOfProcesses>(world, task, options);
}

}  // namespace lockstep
