// SPDX-License-Identifier: Apache-2.0
// `averaging`: every device trains a replica of its own, and the parameters are averaged every h batches.
// docs/strategies/averaging.md has the methods and their sources.
//
//   1 scheduling thread prepares a batch and hands each of N device threads its part
//   N device threads    forward, backward and update of their own replica, without exchange
//   every h batches     replica 0 = the mean of all replicas, weighted by the samples they saw; then copied to all
//
// Between processes and machines the averages are averaged once more, through World. With a delay, or in int8, the replicas
// train on while a part of the parameters is under way (background_sum.h), and are mixed with its outer step some batches
// later. synchronise() (before validation and checkpoints) averages at once, after what is under way, and the replicas of
// all ranks continue with the momentum and the buffers of rank 0's replica 0.
//
// Owns:    the devices' threads; per device a replica and one flat block of its parameters; with an outer step or in the
//          background its anchor and momentum; in int8 what was lost
// Threads: one scheduling thread
// Ranks:   every rank has its own devices; all ranks make the same calls. Sends 2(R-1)/R K every h batches over R ranks,
//          and 32 bytes for the loss of each batch
#include <algorithm>
#include <deque>
#include <numeric>
#include <optional>
#include <utility>

#include "lockstep/base/cache_line.h"
#include "lockstep/base/require.h"
#include "lockstep/base/text.h"
#include "lockstep/base/to_size.h"
#include "lockstep/model/parameters.h"
#include "lockstep/sampler.h"
#include "lockstep/strategy/averaging/background_sum.h"
#include "lockstep/strategy/averaging/flat_block.h"
#include "lockstep/strategy/devices/replica_strategy.h"
#include "lockstep/strategy/strategies.h"

namespace lockstep {
namespace {

void require_sensible(const AveragingOptions& options) {
  const auto [every, outer_lr, outer_momentum, parts, delay, mix, in] = options;
  require(every >= 1, concat("--average-every ", every), "give at least 1 batch");
  require(outer_lr > 0 && outer_momentum >= 0, concat("--outer-lr ", outer_lr, ", --outer-momentum ", outer_momentum),
          "give a positive rate and a momentum of at least 0");
  require(parts >= 1 && parts <= every && delay >= 0 && delay <= every,
          concat("--average-parts ", parts, ", --average-delay ", delay, ", --average-every ", every),
          "give at least 1 part, and no more parts or delay than batches between averages");
  require(mix >= 0 && mix < 1, concat("--average-mix ", mix), "give a share from 0 to below 1");
}

// DiLoCo's outer optimizer: takes a step of Nesterov's SGD towards the average.
class OuterStep {
 public:
  OuterStep(const Tensor& block, const AveragingOptions& options)
      : anchor_(block.clone().requires_grad_()),
        sgd_({anchor_},
             {.lr = options.outer_lr, .momentum = options.outer_momentum, .nesterov = options.outer_momentum > 0}) {
    // Made now, so that a checkpoint can be restored into it.
    Optimizer::StateTensors state{{"step", torch::ones({})}};
    if (options.outer_momentum > 0) state["momentum_buffer"] = torch::zeros_like(block);
    sgd_.set_state(anchor_, state);
  }

  // Replaces the average by the result of the outer step. Its gradient is anchor - average, where the anchor is the
  // result of the last step.
  void apply(const Tensor& average) {
    const torch::NoGradGuard no_grad;
    step(anchor_.detach() - average);
    average.copy_(anchor_);
  }

  void step(const Tensor& gradient) {
    anchor_.mutable_grad() = gradient;
    sgd_.step();
    anchor_.mutable_grad() = Tensor();
  }

  Tensor result() const { return anchor_.detach(); }

  void restart_from(const Tensor& block) {
    const torch::NoGradGuard no_grad;
    anchor_.copy_(block);
  }

  void add_state(const std::string& prefix, NamedTensors& tensors) const {
    for (const auto& [name, tensor] : sgd_.state_of(anchor_))
      if (tensor.defined()) tensors.push_back({prefix + name, tensor});
  }

 private:
  Tensor anchor_;
  SGD sgd_;
};

// A range of the parameters, which is averaged by itself.
struct AveragedPart {
  Tensors blocks;                         // the range in each replica's block
  std::vector<int64_t> samples;           // that each replica has seen since the last average
  int64_t all_samples = 0;                // that all replicas of all ranks have
  std::optional<OuterStep> outer;         // none: the average is taken as it is
  std::optional<int64_t> batches_left{};  // until the sum under way is mixed in; none: nothing is under way
};

class Averaging : public ReplicaStrategy {
 public:
  Averaging(const World& world, const Task& task, const StrategyOptions& options)
      : ReplicaStrategy(world, task, options),
        world_(world),
        options_(options.averaging),
        in_background_(averages_in_background(options_)) {
    require_sensible(options_);
    require_same_model(world, named_parameters(model()));
    broadcast_model(world, model());
    for (const Replica& replica : replicas_)  // other processes read replica 0's block
      blocks_.push_back(make_flat_block(named_parameters(*replica.model), blocks_.empty() ? world_ : World::single()));
    follow_first(replicas_);
    make_parts();
    seed_steps(options.seed, world.rank());
  }

  BatchTotals forward_backward(const Batch& batch) override {
    const auto parts = parts_for_devices(batch);
    const auto samples = std::make_shared<std::vector<int64_t>>(parts.size());
    const auto losses = in_phase(Phase::kBackward, [&] {
      return run_replicas(*devices_, replicas_, parts,
                          [task = task_, most = int64_t{accumulate_}, samples](
                              const Replica& replica, const Batch& mine, const Device& device) {
                            const std::vector<Batch> pieces = parts_of(mine, to_int(std::min(most, mine.size())));
                            int64_t& all = for_device(*samples, device);
                            std::vector<int64_t> counts;  // once: on a GPU each waits
                            for (const Batch& piece : pieces) all += counts.emplace_back(samples_of(task, piece));
                            if (all == 0) return Tensor();
                            Tensor mean = torch::zeros({}, replica.device);
                            for (size_t i = 0; i < pieces.size(); ++i) {
                              if (counts[i] == 0) continue;
                              const Tensor loss =
                                  task.loss(replica.forward(task, pieces[i]), pieces[i]) * fraction(counts[i], all);
                              loss.backward();
                              mean = mean + loss.detach();
                            }
                            return mean;
                          });
    });
    BatchTotals mine{.examples = batch.size()};
    for (size_t i = 0; i < parts.size(); ++i) {
      const int64_t count = (*samples)[i];
      if (count > 0) on_device(losses[i].device(), [&] { mine.add(count, losses[i].item<double>()); });
      for (AveragedPart& part : parts_) part.samples[i] += count;
    }
    const BatchTotals all = world_.size() == 1 ? mine : sum_totals(world_, mine);
    for (AveragedPart& part : parts_) part.all_samples += all.samples;
    return all;
  }

  void update() override {
    update_replicas();
    is_one_model_ = false;
    ++batches_;
    for (size_t i = 0; i < parts_.size(); ++i) average_when_due(i);
    if (batches_ == options_.every) batches_ = 0;
  }

  void synchronise() override {
    if (!is_one_model_) in_phase(Phase::kExchange, [&] { in_background_ ? settle() : average_all(); });
    is_one_model_ = true;
    batches_ = 0;
    if (world_.size() > 1) {
      broadcast_tensors(world_, named_buffers(model()));
      optimizer().broadcast_state(world_, 0);
    }
    follow_first(replicas_);
  }

  void restored(int64_t) override {
    is_one_model_ = true;
    follow_first(replicas_);
    if (sums_) sums_->restored();
    for (AveragedPart& part : parts_)
      if (part.outer) part.outer->restart_from(part.blocks.front());
  }

  NamedTensors state() override {
    NamedTensors tensors = sums_ ? sums_->state() : NamedTensors();
    for (size_t i = 0; i < parts_.size(); ++i)
      if (parts_[i].outer)
        parts_[i].outer->add_state(parts_.size() == 1 ? "outer." : concat("outer.", i, "."), tensors);
    return tensors;
  }

  Report report() const override {
    return {{"average_every", options_.every},
            {"averages", averages_},
            {"block_bytes", blocks_.front().nbytes()},
            {"exchanged_bytes", world_.size() > 1 ? exchanged_bytes_ : 0}};
  }

 private:
  void make_parts() {
    const bool has_outer_step = in_background_ || options_.outer_lr != 1 || options_.outer_momentum > 0;
    const int64_t unit = to_int64(kCacheLine) / blocks_.front().element_size();
    Tensors first;
    for (int64_t i = 0; i < options_.parts; ++i) {
      const Range range = even_part(blocks_.front().numel() / unit, to_int(i), to_int(options_.parts));
      AveragedPart& part = parts_.emplace_back();
      for (const Tensor& block : blocks_) part.blocks.push_back(block.slice(0, range.begin * unit, range.end * unit));
      part.samples.resize(blocks_.size());
      if (has_outer_step) part.outer.emplace(part.blocks.front(), options_);
      first.push_back(part.blocks.front());
    }
    if (in_background_) sums_.emplace(world_, first, options_.in == AverageIn::kInt8);
  }

  // Parts take their turns, evenly over the batches between two averages; with one, it is the last batch.
  void average_when_due(size_t i) {
    AveragedPart& part = parts_[i];
    const bool arrives = part.batches_left && --*part.batches_left == 0;
    const bool is_due = batches_ == options_.every * to_int64(i + 1) / options_.parts;
    if (!arrives && !is_due) return;
    in_phase(Phase::kExchange, [&] {
      if (arrives) mix_in(i, 1 - options_.mix);
      if (!is_due) return;
      if (!in_background_) return average(part);
      send(i);
      if (options_.delay == 0) mix_in(i, 1);
    });
  }

  void average_all() {
    for (AveragedPart& part : parts_) average(part);
  }

  // With N devices in each of R ranks and K bytes of parameters:
  //
  //   1  collect     each device scales its block by its share of all samples; then device d adds up part d of the N
  //                  blocks into block 0: it reads K and writes K/N
  //   2  all_reduce  block 0 over the ranks: each sends 2(R-1)/R K. It is the weighted mean of all R*N replicas now
  //   3  outer step  on every rank with the same numbers, and so with the same result
  //   4  copy back   each device copies block 0 into its own: K read, K written
  //
  // Steps 1 and 4 end with a wait for all devices (Devices::run). So replica 0 can't train on while others still copy
  // from its block.
  void average(AveragedPart& part) {
    const int64_t all = std::exchange(part.all_samples, 0);
    if (all == 0) return;
    mean_onto_first(*devices_, part.blocks, part.samples, all);
    const Tensor& block = part.blocks.front();
    all_reduce_first(block);
    if (part.outer) part.outer->apply(block);
    copy_from_first(*devices_, part.blocks);
    std::ranges::fill(part.samples, 0);
    exchanged_bytes_ += to_int64(block.nbytes());
    ++averages_;
  }

  // Ranks exchange blocks of GPUs over the host.
  void all_reduce_first(const Tensor& block) {
    if (world_.size() == 1) return;
    if (block.is_cpu()) return world_.all_reduce(block);
    if (!host_.defined()) host_ = world_.allocate({blocks_.front().numel()}, block.scalar_type());
    const Tensor host = host_.slice(0, 0, block.numel());
    on_device(block.device(), [&] { host.copy_(block); });
    world_.all_reduce(host);
    on_device(block.device(), [&] { block.copy_(host, /*non_blocking=*/true); });
  }

  // ---- In the background

  // Step 1 with copies, which go on their way as this rank's share of the change since the last outer step.
  void send(size_t i) {
    const torch::NoGradGuard no_grad;
    AveragedPart& part = parts_[i];
    const int64_t all = std::exchange(part.all_samples, 0);
    if (all == 0) return;
    const Tensors copies = copies_of(part.blocks);
    mean_onto_first(*devices_, copies, part.samples, all);
    const int64_t mine = std::accumulate(part.samples.begin(), part.samples.end(), int64_t{0});
    exchanged_bytes_ += sums_->start(
        i, on_device(copies.front().device(),
                     [&] { return copies.front().sub_(part.outer->result(), fraction(mine, all)).to(torch::kCPU); }));
    part.batches_left = options_.delay;
    std::ranges::fill(part.samples, 0);
    ++averages_;
  }

  // Waits for what is under way. weight: the share of the outer step's result in each replica.
  void mix_in(size_t i, double weight) {
    if (take_outer_step(i)) follow_outer(parts_[i], weight);
  }

  // False: nothing was under way.
  bool take_outer_step(size_t i) {
    AveragedPart& part = parts_[i];
    if (!part.batches_left) return false;
    part.batches_left.reset();
    const torch::NoGradGuard no_grad;
    const torch::Device device = part.blocks.front().device();
    const Tensor change = sums_->finish(i);
    on_device(device, [&] { part.outer->step(change.to(device).neg_()); });
    return true;
  }

  void follow_outer(const AveragedPart& part, double weight) {
    Tensors results{part.outer->result()};
    for (size_t i = 1; i < part.blocks.size(); ++i) results.push_back(torch::empty_like(part.blocks[i]));
    copy_from_first(*devices_, results);
    devices_->run([results, blocks = part.blocks, weight](Device& device) {
      const torch::NoGradGuard no_grad;
      const Tensor& block = for_device(blocks, device);
      weight == 1 ? block.copy_(for_device(results, device)) : block.lerp_(for_device(results, device), weight);
    });
  }

  // Afterwards nothing is under way, and every replica has the results of the outer steps. All parts go on their way at once.
  void settle() {
    for (size_t i = 0; i < parts_.size(); ++i) {
      mix_in(i, 1 - options_.mix);
      send(i);
    }
    for (size_t i = 0; i < parts_.size(); ++i) {
      take_outer_step(i);
      follow_outer(parts_[i], 1);
    }
    sums_->even_out();
  }

  Tensors copies_of(const Tensors& blocks) {
    Tensors copies;
    for (const Tensor& block : blocks) copies.push_back(torch::empty_like(block));
    devices_->run([=](Device& device) { for_device(copies, device).copy_(for_device(blocks, device)); });
    return copies;
  }

  World world_;
  AveragingOptions options_;
  bool in_background_;
  Tensors blocks_;  // of each replica's parameters
  Tensor host_;     // of several ranks with GPUs: block 0 on its way
  std::deque<AveragedPart> parts_;
  std::optional<BackgroundSum> sums_;
  int64_t batches_ = 0;  // in this round of `every`
  int64_t averages_ = 0;
  int64_t exchanged_bytes_ = 0;  // if there are other ranks
};

}  // namespace

// Every device has a replica of its own. In the background there are an anchor, in int8 what was lost, copies of a part
// that is sent, and the parts that are under way, in int8 those of all machines.
HeldBytes bytes_of_averaging(const PlannedRun& run) {
  const AveragingOptions& options = run.options.averaging;
  const bool in_int8 = options.in == AverageIn::kInt8 && run.machines > 1;
  HeldBytes bytes = bytes_of_data_parallel(run);
  bytes.parameters *= run.devices;
  bytes.state *= run.devices;
  if (!averages_in_background(options)) return bytes;
  const double under_way = std::max(1.0, fraction(options.delay * options.parts, options.every));
  bytes.parameters += run.parameters * (1 + in_int8);
  bytes.buckets =
      run.parameters / to_double(options.parts) * (run.devices - 1 + under_way * (in_int8 ? run.machines / 4.0 : 1));
  return bytes;
}

std::unique_ptr<Strategy> make_averaging(const World& world, const Task& task, const StrategyOptions& options) {
  return std::make_unique<Averaging>(world, task, options);
}

}  // namespace lockstep
