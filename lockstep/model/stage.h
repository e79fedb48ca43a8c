// model/stage.h: a model as consecutive pieces, for strategies that put them on different devices.
//
// Flow:    Task::stages, or stages_of a torch::nn::Sequential -> strategy/pipeline.h
// Owns:    nothing: a Stage is of use as long as the model that it was made from
// Threads: each Stage from one thread at a time; different ones at the same time
// Ranks:   no communication
//
// Running the stages one after another gives what the model's own forward gives. What one stage returns is what the
// next one takes: usually one tensor; several where a skip connection or a mask crosses the cut (S1's model
// parallelism).
#pragma once

#include <torch/nn/module.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/types.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

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
