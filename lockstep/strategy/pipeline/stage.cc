// SPDX-License-Identifier: Apache-2.0
#include "lockstep/strategy/pipeline/stage.h"

#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <map>

#include "lockstep/base/torch_version.h"
#include "lockstep/collective/gpus.h"
#include "lockstep/data/loader/random.h"
#include "lockstep/deadline.h"
#include "lockstep/model/allocation_meter.h"
#include "lockstep/observe/trace.h"
#include "lockstep/strategy/devices/replica.h"
#include "lockstep/strategy/devices/thread_generator.h"
#include "lockstep/strategy/pipeline/add_in_place.h"
#include "lockstep/world.h"

namespace lockstep {

int most_in_flight(PipelineSchedule schedule, int stage, int stages, int micro_batches) {
  return schedule == PipelineSchedule::k1F1B ? std::min(stages - stage, micro_batches) : micro_batches;
}

// Three phases. First `ahead` forward steps fill the stages behind: with 1f1b, stage s of p may be p - s micro-batches
// ahead, because that many fit between it and the end of the pipeline and back. Then one backward and one forward step
// in turn, so that `ahead` micro-batches stay in flight. Last, the remaining backward steps. gpipe and naive are the
// case of ahead = m: all forward, then all backward.
std::vector<PipelineStep> steps_of_stage(PipelineSchedule schedule, int stage, int stages, int micro_batches) {
  const int ahead = most_in_flight(schedule, stage, stages, micro_batches);
  std::vector<PipelineStep> steps;
  for (int i = 0; i < ahead; ++i) steps.push_back({.forward = true, .micro_batch = i});
  for (int i = 0; i < micro_batches; ++i) {
    steps.push_back({.forward = false, .micro_batch = i});
    if (i + ahead < micro_batches) steps.push_back({.forward = true, .micro_batch = i + ahead});
  }
  return steps;
}

Edges edges_of(const Tensors& outputs) {
  Edges edges;
  for (const Tensor& each : outputs)
    edges.push_back(each.defined() ? torch::autograd::impl::gradient_edge(each) : torch::autograd::Edge());
  return edges;
}

namespace {

// The root of a backward: gives gradients to the nodes that the edges lead to, and keeps none. torch's own backward()
// would keep them until it ends.
struct Handover : torch::autograd::Node {
  Handover(torch::autograd::edge_list edges, Tensors gradients)
      : Node(std::move(edges)), gradients_(std::move(gradients)) {}
  torch::autograd::variable_list apply(torch::autograd::variable_list&&) override { return std::move(gradients_); }
  std::string name() const override { return "Handover"; }  // in a timeline

  Tensors gradients_;
};

}  // namespace

void backward_from(Edges outputs, Tensors gradients) {
  const auto first = std::ranges::find_if(gradients, [](const Tensor& each) { return each.defined(); });
  if (first == gradients.end()) return;
  for (size_t i = 0; i < outputs.size(); ++i) {
    if (!gradients[i].defined()) outputs[i] = {};
    if (gradients[i].defined() && !outputs[i].is_valid())
      throw UsageError(
          {.what = "a stage's output or loss needs no gradient, so nothing is trained by it",
           .likely = "it was detached, or all parameters are frozen",
           .next = "compute the loss from what the model returns, and leave a parameter with requires_grad"});
  }
  Tensor root = torch::empty({}, first->options());
  torch::autograd::create_gradient_edge(root, make_node<Handover>(std::move(outputs), std::move(gradients)));
  torch::autograd::backward({root}, {torch::empty_like(root)});
}

namespace {

Tensors input_gradients(const Tensors& inputs) {
  Tensors gradients;
  for (const Tensor& input : inputs)
    gradients.push_back(input.defined() && input.requires_grad() ? input.grad() : Tensor());
  return gradients;
}

class StageRun {
 public:
  StageRun(const Task& task, const StageWork& work, const StageLinks& links)
      : task_(task), work_(work), links_(links) {}

  // Neighbours can't wait for each other: both take their forward steps, and their backward steps, in the order 0, 1,
  // ... (steps_of_stage), so that messages arrive in the order in which they are asked for; and no send blocks, because
  // a channel has room for all micro-batches and messages between ranks are sent in the background.
  StageResult run() {
    const AllocationMeter meter(work_.device);
    for (const PipelineStep& step : work_.steps) step.forward ? forward(step.micro_batch) : backward(step.micro_batch);
    result_.memory = meter.most();
    if (links_.before) links_.before->finish();
    if (links_.behind) links_.behind->finish();
    return result_;
  }

 private:
  struct InFlight {
    Tensors inputs;
    Edges outputs;  // the next stage has the values
    Tensors seeds;  // last stage: the gradient of the loss
  };

  void forward(int micro_batch) {
    InFlight& kept = in_flight_[micro_batch];
    result_.in_flight = std::max(result_.in_flight, to_int(in_flight_.size()));
    kept.inputs = links_.before ? links_.before->receive() : inputs_of(batch(micro_batch));
    const trace::Span span("forward", micro_batch);
    const Stopwatch watch;
    Tensors outputs = through_pieces(kept.inputs, micro_batch);
    if (!links_.behind) {
      outputs = {loss_of(outputs, micro_batch)};
      kept.seeds = {torch::ones_like(outputs[0])};
    }
    kept.outputs = edges_of(outputs);
    if (work_.waits) wait_for_device(work_.device);
    result_.busy += watch.seconds();
    if (links_.behind) links_.behind->send(as_leaves(outputs));
  }

  Tensors through_pieces(Tensors tensors, int micro_batch) {
    int index = work_.first_piece;
    const OperatorHandlerGuard guard(large_weights_);
    for (const Piece& piece : work_.pieces) {
      const uint64_t seed = mix_seed(mix_seed(work_.seed, index++), micro_batch);
      ThreadGenerator::seed(seed);
      if (!work_.device.is_cpu()) seed_gpu(work_.device, seed);
      tensors = piece.forward(tensors);
    }
    return tensors;
  }

  void backward(int micro_batch) {
    InFlight kept = std::move(in_flight_[micro_batch]);
    // A neighbour that is late would have this stage keep more and more gradients. No deadlock: until it has received
    // the last gradient, the stage before needs nothing that this stage does from here on.
    if (links_.before && work_.device.is_cpu()) links_.before->finish();
    Tensors gradients = links_.behind ? links_.behind->receive() : std::move(kept.seeds);
    const trace::Span span("backward", micro_batch);
    const Stopwatch watch;
    backward_from(std::move(kept.outputs), std::move(gradients));
    in_flight_.erase(micro_batch);
    if (work_.waits) wait_for_device(work_.device);
    result_.busy += watch.seconds();
    if (links_.before) links_.before->send(input_gradients(kept.inputs));
  }

  // The mean loss of the micro-batch, times its share of the whole batch.
  Tensor loss_of(const Tensors& outputs, int micro_batch) {
    const double share = fraction(work_.counts[micro_batch], work_.samples);
    const Tensor loss = task_.loss(outputs.at(0), batch(micro_batch)) * share;
    if (work_.waits)  // Devices::run has the deadline, and names the stage that all others wait for
      wait_for_device(work_.device);
    else
      wait_for_device(work_.device, work_.timeout);
    result_.loss += loss.item<double>();
    return loss;
  }

  const Batch& batch(int micro_batch) const { return work_.micro_batches[micro_batch]; }

  const Task& task_;
  const StageWork& work_;
  const StageLinks& links_;
  LargeWeights large_weights_;
  std::map<int, InFlight> in_flight_;
  StageResult result_;
};

}  // namespace

StageResult run_stage(const Task& task, const StageWork& work, const StageLinks& links) {
  for (const Batch& each : work.micro_batches) {
    if (!links.before) require_device(Batch{each.data, {}, each.more}, work.device);
    if (!links.behind) require_device(Batch{{}, each.target, each.more}, work.device);
  }
  return StageRun(task, work, links).run();
}

IntVector<Batch> micro_batches_of(const Batch& batch, int64_t most) {
  return parts_of(batch, to_int(std::min(most, batch.size())));
}

}  // namespace lockstep
