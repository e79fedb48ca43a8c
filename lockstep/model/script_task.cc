// SPDX-License-Identifier: Apache-2.0
#include <filesystem>

#include "lockstep/models.h"
#include "lockstep/script_module.h"

namespace lockstep {

// Takes the loss that the targets ask for.
Task script_task(const std::string& file) {
  Task task;
  task.make_model = [file] { return ScriptModule(file).ptr(); };
  task.forward = [](torch::nn::Module& model, const torch::Tensor& data) {
    return dynamic_cast<ScriptModuleImpl&>(model).forward(data);
  };
  task.loss = CrossEntropy{.classes_last = true};
  task.name = std::filesystem::path(file).stem();
  task.fit = [file](const SampleShape& sample) {
    Task fitted = script_task(file);
    fitted.sample = sample;
    if (sample.numbers > 0) {
      fitted.loss = [](const torch::Tensor& output, const torch::Tensor& target) {
        return torch::mse_loss(output, target.view_as(output));
      };
      return fitted;
    }
    fitted.correct = [](const torch::Tensor& output, const torch::Tensor& target) {
      return output.argmax(-1).eq(target).to(torch::kFloat64).flatten().sum() * target.size(0) / target.numel();
    };
    return fitted;
  };
  return task;
}

}  // namespace lockstep
