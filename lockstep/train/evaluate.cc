// SPDX-License-Identifier: Apache-2.0
#include "lockstep/train/evaluate.h"

#include <cmath>

#include "lockstep/observe/phase_scope.h"
#include "lockstep/strategy/devices/replica.h"

namespace lockstep {
namespace {

// Gives each module back its mode in the end.
class EvaluationMode {
 public:
  explicit EvaluationMode(torch::nn::Module& model) : modules_(model.modules()) {
    for (const auto& module : modules_) trained_.push_back(module->is_training());
    model.eval();
  }
  ~EvaluationMode() {
    for (size_t i = 0; i < modules_.size(); ++i)  // a module before those in it
      if (modules_[i]->is_training() != trained_[i]) modules_[i]->train(trained_[i]);
  }
  EvaluationMode& operator=(EvaluationMode&&) = delete;

 private:
  std::vector<ModulePtr> modules_;
  std::vector<bool> trained_;
};

using Forward = std::function<Tensor(const Batch& batch)>;

constexpr int64_t kTotals = 4;

// Sums of the loss, of what is correct, of the samples and of the rows (kTotals), and of each metric. float64 holds
// every count exactly.
Tensor evaluate_part(const Task& task, const Forward& forward, Loader& loader) {
  int64_t numbers = kTotals;
  for (const Metric& metric : task.metrics) numbers += c10::multiply_integers(metric.sizes);
  Tensor sums = torch::zeros(numbers, torch::kFloat64);
  for (const Batch& batch : loader.epoch(0)) {
    if (batch.size() == 0) continue;
    const Tensor output = forward(batch);
    if (!output.defined()) continue;  // another rank has it
    const Batch judged = judged_on(output.device(), batch);
    const int64_t samples = samples_of(task, judged);
    const auto value_of = [&](const OutputFunction& function) {  // of what counts nothing the loss may be NaN
      return samples > 0 ? function(output, judged).item<double>() : 0;
    };
    const double loss = value_of(task.loss) * to_double(samples);
    const double correct = task.correct ? value_of(task.correct) : std::nan("");
    Tensors parts = {torch::tensor({loss, correct, to_double(samples), to_double(batch.size())}, torch::kFloat64)};
    for (const Metric& metric : task.metrics)
      parts.push_back(metric.sum(output, judged).to(torch::kCPU, torch::kFloat64).reshape({-1}));
    sums += torch::cat(parts);
  }
  return sums;
}

// sharing: the ranks that share the samples out among them; world: those that get the result.
Evaluation evaluate_on(const World& sharing, const World& world, const Task& task, const Forward& forward,
                       torch::nn::Module& model, const DatasetPtr& dataset, LoaderOptions options) {
  const torch::NoGradGuard no_grad;
  const EvaluationMode mode(model);
  options.batch_size *= sharing.size();
  options.shuffle = false;
  Loader loader(sharing, dataset, options);
  const Tensor sums = evaluate_part(task, forward, loader);
  world.all_reduce(sums);
  const auto* total = sums.const_data_ptr<double>();
  Evaluation found{
      .loss = total[0] / total[2], .accuracy = total[1] / total[2], .samples = static_cast<int64_t>(total[2])};
  const auto rows = static_cast<int64_t>(total[3]);
  int64_t place = kTotals;
  for (const Metric& metric : task.metrics) {
    const int64_t numbers = c10::multiply_integers(metric.sizes);
    const Tensor sum = sums.narrow(0, place, numbers).view(metric.sizes);
    found.metrics[metric.name] = metric.value ? metric.value(sum, rows) : sum / rows;
    place += numbers;
  }
  return found;
}

}  // namespace

Evaluation evaluate(const World& world, const Task& task, torch::nn::Module& model, const DatasetPtr& dataset,
                    LoaderOptions options) {
  const auto parameters = model.parameters();
  const torch::Device device = parameters.empty() ? world.device() : parameters.front().device();
  const auto forward = [&](const Batch& batch) { return task.forward(model, batch.to(device)); };
  return evaluate_on(world, world, task, forward, model, dataset, std::move(options));
}

Evaluation evaluate(const World& world, const Task& task, Strategy& strategy, const DatasetPtr& dataset,
                    LoaderOptions options) {
  const PhaseScope validating(Phase::kValidating);
  strategy.synchronise();
  const auto forward = [&](const Batch& batch) { return strategy.forward(batch); };
  return evaluate_on(strategy.ranks(world).validation, world, task, forward, strategy.model(), dataset,
                     std::move(options));
}

namespace {

Json to_json(const Tensor& tensor) {
  if (tensor.dim() == 0) return tensor.item<double>();
  Json list = Json::array();
  for (int64_t i = 0; i < tensor.size(0); ++i) list.push_back(to_json(tensor[i]));
  return list;
}

}  // namespace

void add_evaluation(Json& event, const std::string& prefix, const Evaluation& evaluation) {
  constexpr int64_t kMostNumbers = 1024;
  event[prefix + "loss"] = evaluation.loss;
  event[prefix + "accuracy"] = evaluation.accuracy;
  for (const auto& [name, figure] : evaluation.metrics)
    if (figure.numel() <= kMostNumbers) event[prefix + name] = to_json(figure);
}

}  // namespace lockstep
