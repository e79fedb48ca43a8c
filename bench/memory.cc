// SPDX-License-Identifier: Apache-2.0
// `lockstep bench memory`: the memory of each stage of a pipeline, beside what it can't do without: parameters, gradients,
// optimizer state, and what autograd saves for the micro-batches in flight, counted by saved-tensor hooks on one device.
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/saved_variable_hooks.h>

#include <ATen/Parallel.h>

#include <iostream>
#include <map>
#include <mutex>
#include <set>

#include "bench/harness.h"
#include "lockstep/base/text.h"
#include "lockstep/base/to_size.h"
#include "lockstep/error.h"
#include "lockstep/model/parameters.h"
#include "lockstep/model/partial_model.h"
#include "lockstep/models.h"
#include "lockstep/strategy.h"
#include "lockstep/strategy/pipeline/cut.h"
#include "lockstep/strategy/pipeline/stage.h"

namespace lockstep::bench {
namespace {

struct MemoryOptions {
  std::vector<std::string> models{"resnet50", "gpt2"};
  std::vector<int> stages{2, 4, 10};
  int64_t samples = 4;  // of a micro-batch
  int64_t tokens = 64;  // of a sequence
  double at_most = 0;   // peak / (fixed + saved) of a stage; 0: any
};

// ---- what autograd saves, on one device

std::map<const void*, double>* saved_bytes = nullptr;  // of each storage, while they are counted

struct CountingHooks : torch::autograd::SavedVariableHooks {
  void call_pack_hook(const at::Tensor& tensor) override {
    saved = tensor;
    if (saved_bytes != nullptr)
      (*saved_bytes)[tensor.storage().unsafeGetStorageImpl()] = static_cast<double>(tensor.storage().nbytes());
  }
  at::Tensor call_unpack_hook() override { return saved; }
  at::Tensor saved;
};

// As Python's torch.autograd.graph.saved_tensors_hooks, which C++ has no other way to.
struct CountingEngine : torch::autograd::Engine {
  std::unique_ptr<torch::autograd::SavedVariableHooks> get_default_saved_variable_hooks() override {
    return saved_bytes == nullptr ? nullptr : std::make_unique<CountingHooks>();
  }
};

torch::autograd::Engine& counting_engine() {
  static auto* const engine = new CountingEngine;  // as long as the process runs
  return *engine;
}

// Bytes that are saved for one micro-batch by the pieces of each stage, without parameters.
std::vector<double> saved_by_stages(const Task& task, const Cut& cut, const Batch& micro_batch) {
  const ModulePtr model = task.make_model();
  set_layout(*model, preferred_layout(*model, torch::kCPU));
  const auto pieces = pieces_of(task, *model);
  std::vector<double> bytes;
  Tensors tensors = {in_layout(micro_batch.data, preferred_layout(*model, torch::kCPU))};
  for (const Range& range : cut) {
    std::map<const void*, double> saved;
    saved_bytes = &saved;
    for (const Piece& piece : pieces_in(pieces, range)) tensors = piece.forward(tensors);
    if (range.end == static_cast<int64_t>(pieces.size())) tensors = {task.loss(tensors[0], micro_batch.target)};
    saved_bytes = nullptr;
    for (const torch::Tensor& each : model->parameters()) saved.erase(each.storage().unsafeGetStorageImpl());
    bytes.push_back(0);
    for (const auto& [storage, size] : saved) bytes.back() += size;
    tensors = as_leaves(tensors);
  }
  return bytes;
}

// ---- what a stage has

struct StageMemory {
  double held = 0;   // parameters, buffers, gradients and optimizer state
  double saved = 0;  // for the micro-batches in flight
  double peak = 0;   // all tensors of the stage, at most
  int in_flight = 0;

  double ratio() const { return peak / (held + saved); }
};

double bytes_of(const std::vector<NamedTensor>& tensors) {
  double bytes = 0;
  for (const auto& [name, tensor] : held(tensors)) bytes += static_cast<double>(tensor.nbytes());
  return bytes;
}

double state_bytes(Strategy& strategy) {
  double bytes = 0;
  for (const auto& [name, parameter] : held(named_parameters(strategy.model())))
    for (const auto& [key, state] : strategy.optimizer().state_of(parameter))
      bytes += static_cast<double>(state.nbytes());
  return bytes;
}

// Two steps; each stage is a rank, and counts what its thread allocates.
std::vector<StageMemory> train(const Task& task, const Cut& cut, const Batch& batch) {
  std::vector<StageMemory> stages(to_size(cut.size()));
  std::mutex mutex;
  run_ranks(cut.size(), [&](World& world) {
    at::set_num_threads(1);
    const auto strategy = make_strategy(world, task,
                                        {.kind = StrategyKind::kPipeline,
                                         .optimizer = AdamWOptions{.lr = 1e-4},
                                         .pipeline = {.stages = to_string(cut), .micro_batches = cut.size()}});
    for (int step = 0; step < 2; ++step) {
      strategy->forward_backward(batch);
      strategy->update();
    }
    const double parameters = bytes_of(named_parameters(strategy->model()));
    const double fixed_bytes = parameters + bytes_of(named_buffers(strategy->model())) + state_bytes(*strategy);
    const lockstep::Report report = strategy->report();
    const std::map<std::string, double> figures(report.begin(), report.end());
    const std::string name = concat("stage_", world.rank());
    const std::lock_guard lock(mutex);
    stages[to_size(world.rank())] = {.held = fixed_bytes + parameters,
                                     .saved = 0,
                                     .peak = fixed_bytes + figures.at(name + "_bytes"),
                                     .in_flight = static_cast<int>(figures.at(name + "_in_flight"))};
  });
  return stages;
}

// ---- the table

Batch random_batch(const Task& task, int64_t samples, int64_t tokens) {
  const SampleShape& shape = task.sample;
  if (shape.tokens) {
    const torch::Tensor data = torch::randint(0, shape.classes, {samples, tokens}, torch::kInt64);
    return {data, data.roll(-1, 1)};
  }
  std::vector<int64_t> sizes = shape.sizes;
  sizes.insert(sizes.begin(), samples);
  return {torch::randn(sizes), torch::randint(0, shape.classes, {samples}, torch::kInt64)};
}

// As many pieces in each stage.
Cut even_cut(int64_t pieces, int stages) {
  Cut cut;
  for (int stage = 0; stage < stages; ++stage) cut.push_back(even_part(pieces, stage, stages));
  return cut;
}

std::vector<StageMemory> measure(const std::string& model, int count, const MemoryOptions& options) {
  const Task task = model_task(model);
  const int64_t samples = task.sample.tokens ? 1 : options.samples;
  const PartialModel skeleton(task.make_model);
  const Cut cut = even_cut(std::ssize(pieces_of(task, skeleton.skeleton())), count);
  auto stages = train(task, cut, random_batch(task, samples * count, options.tokens));
  const auto saved = saved_by_stages(task, cut, random_batch(task, samples, options.tokens));
  for (size_t i = 0; i < stages.size(); ++i) stages[i].saved = saved[i] * stages[i].in_flight;
  return stages;
}

struct MemoryResults {
  void add(const std::string& model, int count, const std::vector<StageMemory>& stages) {
    for (size_t i = 0; i < stages.size(); ++i) {
      const StageMemory& stage = stages[i];
      table.add({model, concat(count), concat(i), concat(stage.in_flight), fixed(stage.held / 1e6, 1),
                 fixed(stage.saved / 1e6, 1), fixed(stage.peak / 1e6, 1), fixed(stage.ratio(), 3)});
      json["results"].push_back({{"model", model},
                                 {"stages", count},
                                 {"stage", i},
                                 {"in_flight", stage.in_flight},
                                 {"fixed", stage.held},
                                 {"saved", stage.saved},
                                 {"peak", stage.peak}});
      if (stage.ratio() <= most) continue;
      most = stage.ratio();
      most_of = concat(model, " in ", count, " stages, stage ", i);
    }
  }

  Table table{{"model", "stages", "stage", "in flight", "fixed MB", "saved MB", "peak MB", "peak / both"}};
  Json json;
  double most = 0;  // the largest ratio
  std::string most_of;
};

}  // namespace

int bench_memory(int argc, const char* const* argv) {
  MemoryOptions options;
  Program program("memory", "The memory of each stage of a pipeline, beside what it can't do without.", 1);
  program.list("--models", options.models, "as lockstep train")->check(CLI::IsMember(model_names()));
  program.list("--stages", options.stages, "numbers of stages")->check(CLI::Range(1, 18));
  program.option("--samples", options.samples, "images of a micro-batch")->check(CLI::Range(1, 1024));
  program.option("--tokens", options.tokens, "of a sequence; a micro-batch has one")->check(CLI::Range(1, 1024));
  program.option("--at-most", options.at_most, "fail where peak / both is more; 0: never")->check(CLI::Range(0.0, 1e3));
  return program.run(argc, argv, [&] {
    torch::autograd::set_default_engine_stub(&counting_engine);
    MemoryResults results;
    for (const std::string& model : options.models)
      for (const int count : options.stages) results.add(model, count, measure(model, count, options));
    results.table.print(std::cout);
    std::cout
        << "\nfixed: parameters, buffers, gradients and AdamW's state. saved: what autograd keeps of a micro-batch on "
           "one device, times the micro-batches in flight.\n";
    program.save(results.json);
    if (options.at_most > 0 && results.most > options.at_most)
      throw Error("MemoryError", {.what = concat("a stage takes ", results.most, " times what it can't do without"),
                                  .here = results.most_of,
                                  .next = concat("--at-most allows ", options.at_most)});
  });
}

}  // namespace lockstep::bench
