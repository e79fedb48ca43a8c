// model/task.h: what lockstep has to know about a program to train it: how to make its model, run it and judge it.
//
// Flow:    the user's program -> lockstep::run(), lockstep train -> strategy/
// Owns:    nothing but the functions
// Threads: a strategy may call the functions from several threads, each with a model of its own
// Ranks:   every rank gets the same Task
#pragma once

#include <torch/nn/module.h>
#include <torch/types.h>

#include <functional>
#include <memory>
#include <string>

#include "lockstep/data/dataset.h"

namespace lockstep {

using ModulePtr = std::shared_ptr<torch::nn::Module>;

struct Datasets {
  std::shared_ptr<const Dataset> train;
  std::shared_ptr<const Dataset> validation;  // may be null: no validation
};

struct Task {
  // A fresh model on the CPU. Called with torch's generator seeded, once per replica: modules can't be cloned in C++.
  std::function<ModulePtr()> make_model;
  // (B, ...) on the model's device -> the model's output
  std::function<torch::Tensor(torch::nn::Module& model, const torch::Tensor& data)> forward;
  // output and (B) target -> the mean loss over the B samples, a scalar
  std::function<torch::Tensor(const torch::Tensor& output, const torch::Tensor& target)> loss;
  // How many of the samples the output has right, a scalar; empty: no accuracy is reported.
  std::function<torch::Tensor(const torch::Tensor& output, const torch::Tensor& target)> correct = nullptr;
  // What to train on, from --data-dir; empty: --data chooses one of lockstep's.
  std::function<Datasets(const std::string& data_dir)> make_data = nullptr;
  std::string name = "task";  // for tables and metrics
};

// A Task out of a module type `M` (a torch::nn::ModuleHolder such as LeNet) that has forward(Tensor), with cross entropy.
template <class M>
Task classification_task(std::string name) {
  return {.make_model = [] { return M().ptr(); },
          .forward = [](torch::nn::Module& model, const torch::Tensor& data) {
            return dynamic_cast<typename M::Impl&>(model).forward(data);
          },
          .loss = [](const torch::Tensor& output, const torch::Tensor& target) {
            return torch::cross_entropy_loss(output, target);
          },
          .correct = [](const torch::Tensor& output, const torch::Tensor& target) {
            return output.argmax(1).eq(target).sum();
          },
          .name = std::move(name)};
}

}  // namespace lockstep
