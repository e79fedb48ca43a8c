#include "lockstep/strategy/pipeline_stage.h"

#include <torch/csrc/autograd/autograd.h>

#include <algorithm>

#include "lockstep/base/deadline.h"
#include "lockstep/strategy/allocation_meter.h"
#include "lockstep/strategy/thread_generator.h"

namespace lockstep {
namespace {

// What the next stage gets: the same values, without this stage's graph.
Tensors as_leaves(const Tensors& tensors) {
  Tensors leaves;
  for (const torch::Tensor& each : tensors)
    leaves.push_back(each.defined() ? each.detach().requires_grad_(each.requires_grad()) : each);
  return leaves;
}

Tensors gradients_of(const Tensors& inputs) {
  Tensors gradients;
  for (const torch::Tensor& input : inputs)
    gradients.push_back(input.defined() && input.requires_grad() ? input.grad() : torch::Tensor());
  return gradients;
}

void backward_from(const Tensors& outputs, const Tensors& gradients) {
  Tensors roots, seeds;
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    if (!gradients[i].defined()) continue;
    roots.push_back(outputs[i]);
    seeds.push_back(gradients[i]);
  }
  if (!roots.empty()) torch::autograd::backward(roots, seeds);
}

class StageRun {
 public:
  StageRun(Device& device, const Task& task, const StageWork& work) : device_(device), task_(task), work_(work) {}

  StageResult run() {
    const AllocationMeter meter;
    for (const PipelineStep& step : work_.steps) step.forward ? forward(step.micro_batch) : backward(step.micro_batch);
    result_.memory = meter.most_bytes();
    return result_;
  }

 private:
  struct InFlight {
    Tensors inputs;
    Tensors outputs;
  };

  void forward(int micro_batch) {
    InFlight& kept = in_flight_[micro_batch];
    result_.in_flight = std::max(result_.in_flight, static_cast<int>(in_flight_.size()));
    kept.inputs = work_.before ? work_.before->forward.receive(device_) : Tensors{batch(micro_batch).data};
    const Stopwatch watch;
    kept.outputs = through_pieces(kept.inputs, micro_batch);
    if (!work_.behind) kept.outputs = {loss_of(kept.outputs, micro_batch)};
    result_.busy += watch.seconds();
    if (work_.behind) work_.behind->forward.send(device_, as_leaves(kept.outputs));
  }

  Tensors through_pieces(Tensors tensors, int micro_batch) {
    int index = work_.first_piece;
    for (const Stage& piece : work_.pieces) {
      device_.seed(seed_of(seed_of(work_.seed, index++), micro_batch));
      tensors = piece.forward(tensors);
    }
    return tensors;
  }

  void backward(int micro_batch) {
    InFlight kept = std::move(in_flight_[micro_batch]);
    const Tensors gradients = work_.behind ? work_.behind->backward.receive(device_) : Tensors{torch::ones_like(kept.outputs[0])};
    const Stopwatch watch;
    backward_from(kept.outputs, gradients);
    in_flight_.erase(micro_batch);
    result_.busy += watch.seconds();
    if (work_.before) work_.before->backward.send(device_, gradients_of(kept.inputs));
  }

  // A mean over the micro-batch, as its share of the whole batch.
  torch::Tensor loss_of(const Tensors& outputs, int micro_batch) {
    const double share = static_cast<double>(batch(micro_batch).size()) / static_cast<double>(work_.samples);
    const torch::Tensor loss = task_.loss(outputs.at(0), batch(micro_batch).target) * share;
    result_.loss += loss.item<double>();
    return loss;
  }

  const Batch& batch(int micro_batch) const { return work_.micro_batches[static_cast<std::size_t>(micro_batch)]; }

  Device& device_;
  const Task& task_;
  const StageWork& work_;
  std::map<int, InFlight> in_flight_;
  StageResult result_;
};

}  // namespace

StageResult run_stage(Device& device, const Task& task, const StageWork& work) {
  return StageRun(device, task, work).run();
}

}  // namespace lockstep
