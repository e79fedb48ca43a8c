// SPDX-License-Identifier: Apache-2.0
#include "lockstep/verify.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <limits>

#include "lockstep/base/require.h"
#include "lockstep/base/text.h"
#include "lockstep/model/parameters.h"
#include "lockstep/strategy/devices/replica.h"

namespace lockstep {
namespace {

using BatchOf = std::function<Batch(int step)>;

Tensor in_float64(const Tensor& tensor) { return tensor.is_floating_point() ? tensor.to(torch::kFloat64) : tensor; }

// Rank 0's parameters after training on `ranks` ranks with one thread each.
NamedTensors trained(int ranks, Task task, const BatchOf& batch_of, const VerifyOptions& options) {
  NamedTensors parameters;
  if (options.double_precision)
    task.make_model = [make = task.make_model] {
      ModulePtr model = make();
      model->to(torch::kFloat64);
      return model;
    };
  run_ranks(ranks, [&](World& world) {
    at::set_num_threads(1);
    const auto strategy = make_strategy(world, task, options.strategy);
    if (options.strategy.ddp.virtual_shards == 0) strategy->model().eval();
    for (int step = 0; step < options.steps; ++step) {
      const Batch part = part_of(batch_of(step), world.rank(), world.size());
      strategy->forward_backward(options.double_precision ? part.map(in_float64) : part);
      strategy->update();
    }
    if (world.rank() == 0)
      for (const auto& [name, tensor] : named_parameters(strategy->model()))
        parameters.push_back({name, tensor.detach().clone()});
    world.barrier();
  });
  return parameters;
}

double relative_difference(const Tensor& a, const Tensor& b) {
  const double norm = b.to(torch::kFloat64).norm().item<double>();
  const double difference = (a.to(torch::kFloat64) - b.to(torch::kFloat64)).norm().item<double>();
  return difference == 0 ? 0 : difference / std::max(norm, std::numeric_limits<double>::min());
}

}  // namespace

VerifyReport verify(const Task& task, const BatchOf& batch_of, const VerifyOptions& options) {
  const auto many = trained(options.ranks, task, batch_of, options);
  const auto one = trained(1, task, batch_of, options);
  VerifyReport report{.tolerance = options.tolerance};
  for (size_t i = 0; i < one.size(); ++i) {
    const double relative = relative_difference(many[i].tensor, one[i].tensor);
    report.differences.push_back({one[i].name, relative});
    report.equal = report.equal && relative <= options.tolerance;  // also false for NaN
    report.same_bits = report.same_bits && torch::equal(many[i].tensor, one[i].tensor);
  }
  return report;
}

VerifyReport verify(const Task& task, const VerifyOptions& options) {
  const SampleShape& sample = task.sample;
  require(!sample.sizes.empty(), concat("verify(", task.name, "): the shape of a sample is unknown"),
          "give the Task its `sample`, or verify() a function that makes batches");
  const auto random_batch = [&](int step) -> Batch {
    const auto generator = at::make_generator<at::CPUGeneratorImpl>(static_cast<uint64_t>(step));
    std::vector<int64_t> shape = sample.sizes;
    shape.insert(shape.begin(), options.batch_size);
    const auto classes = [&](at::IntArrayRef sizes) {
      return torch::randint(sample.classes, sizes, generator, torch::kInt64);
    };
    if (sample.tokens) return {classes(shape), classes(shape)};
    return {torch::randn(shape, generator), classes({options.batch_size})};
  };
  return verify(task, random_batch, options);
}

std::string VerifyReport::describe() const {
  if (same_bits) return "equal: the same bits";
  if (equal) {
    double largest = 0;
    for (const TensorDifference& each : differences) largest = std::max(largest, each.relative);
    return concat("equal within rounding: parameters differ by at most ", largest, " of their norm");
  }
  for (const TensorDifference& each : differences)
    if (!(each.relative <= tolerance))
      return concat("different: the first parameter that differs is ", each.name, ", by ", each.relative,
                    " of its norm");
  return "different";
}

}  // namespace lockstep
