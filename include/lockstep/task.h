// lockstep/task.h: what lockstep has to know about a program to train it.
#pragma once

#include <torch/nn/module.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/types.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/dataset.h"

// ---- a model as consecutive pieces, for strategies that put them on different devices.
//
// Flow:    Task::stages, or stages_of a torch::nn::Sequential -> strategy/pipeline/pipeline.h
// Owns:    nothing: a Stage is of use as long as the model that it was made from
// Threads: each Stage from one thread at a time; different ones at the same time
// Ranks:   no communication
//
// Running the stages one after another gives what the model's own forward gives. What one stage returns is what the
// next one takes: usually one tensor; several where a skip connection or a mask crosses the cut (S1's model
// parallelism).

namespace lockstep {

using Tensors = std::vector<torch::Tensor>;

struct Stage {
  std::string name;
  std::vector<torch::nn::Module*> modules;  // those whose parameters and buffers it uses; a tied one stands in several
  std::function<Tensors(const Tensors&)> forward;
};

// A stage of one tensor in and one tensor out.
Stage make_stage(std::string name, std::vector<torch::nn::Module*> modules,
                 std::function<torch::Tensor(const torch::Tensor&)> forward);

// A stage for each module that the Sequential holds; each has to take one tensor and give one.
std::vector<Stage> stages_of(torch::nn::SequentialImpl& model);

// data through all stages: what the last one returns first.
torch::Tensor run_stages(const std::vector<Stage>& stages, const torch::Tensor& data);

// The trained parameters of the stages' modules, each once.
std::vector<torch::Tensor> parameters_of(const std::vector<Stage>& stages);

}  // namespace lockstep

// ---- what lockstep has to know about a program to train it: how to make its model, run it and judge it.
//
// Flow:    the user's program -> lockstep::run(), lockstep train -> strategy/
// Owns:    nothing but the functions
// Threads: a strategy may call the functions from several threads, each with a model of its own
// Ranks:   every rank gets the same Task

namespace lockstep {

using ModulePtr = std::shared_ptr<torch::nn::Module>;

struct Datasets {
  std::shared_ptr<const Dataset> train;
  std::shared_ptr<const Dataset> validation;  // may be null: no validation
};

// What the model takes, for data that is made to fit it.
struct SampleShape {
  std::vector<std::int64_t> sizes;  // of one sample, such as {3, 224, 224}; empty: not known
  std::int64_t classes = 0;         // targets are in [0, classes)
  bool tokens = false;              // int64 tokens in, and a target for each of them
};

struct Task {
  // A fresh model on the CPU. Called with torch's generator seeded, once per replica: modules can't be cloned in C++.
  std::function<ModulePtr()> make_model;
  // (B, ...) on the model's device -> the model's output
  std::function<torch::Tensor(torch::nn::Module& model, const torch::Tensor& data)> forward;
  // output and (B, ...) target -> the mean loss over the B samples, a scalar
  std::function<torch::Tensor(const torch::Tensor& output, const torch::Tensor& target)> loss;
  // How many of the samples the output has right, a scalar; empty: no accuracy is reported.
  std::function<torch::Tensor(const torch::Tensor& output, const torch::Tensor& target)> correct = nullptr;
  // What to train on, from --data-dir; empty: --data chooses one of lockstep's.
  std::function<Datasets(const std::string& data_dir)> make_data = nullptr;
  std::string name = "task";  // for tables and metrics
  SampleShape sample = {};
  // The model as consecutive pieces in the finest cut that it allows, for pipelines; empty: a model that is a
  // torch::nn::Sequential is cut between its modules, another one can't be cut.
  std::function<std::vector<Stage>(torch::nn::Module& model)> stages = nullptr;
};

// A Task out of a module type `M` (a torch::nn::ModuleHolder such as LeNet) that has forward(Tensor), with cross
// entropy; `options`: what M is made from. If M has stages(), the task has them too.
template <class M, class... Options>
Task classification_task(std::string name, Options... options) {
  Task task{.make_model = [options...] { return M(options...).ptr(); },
            .forward = [](torch::nn::Module& model,
                          const torch::Tensor& data) { return dynamic_cast<typename M::Impl&>(model).forward(data); },
            .loss = [](const torch::Tensor& output,
                       const torch::Tensor& target) { return torch::cross_entropy_loss(output, target); },
            .correct = [](const torch::Tensor& output,
                          const torch::Tensor& target) { return output.argmax(1).eq(target).sum(); },
            .name = std::move(name)};
  if constexpr (requires(typename M::Impl & model) { model.stages(); })
    task.stages = [](torch::nn::Module& model) { return dynamic_cast<typename M::Impl&>(model).stages(); };
  return task;
}

}  // namespace lockstep
