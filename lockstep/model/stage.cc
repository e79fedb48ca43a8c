#include "lockstep/task.h"

#include <unordered_set>
#include <utility>

namespace lockstep {

Stage make_stage(std::string name, std::vector<torch::nn::Module*> modules,
                 std::function<torch::Tensor(const torch::Tensor&)> forward) {
  return {.name = std::move(name),
          .modules = std::move(modules),
          .forward = [forward = std::move(forward)](const Tensors& in) { return Tensors{forward(in.at(0))}; }};
}

std::vector<Stage> stages_of(torch::nn::SequentialImpl& model) {
  const auto names = model.named_children().keys();
  std::vector<Stage> stages;
  for (torch::nn::AnyModule& module : model)
    stages.push_back(make_stage(names[stages.size()], {module.ptr().get()},
                                [&module](const torch::Tensor& data) { return module.forward<torch::Tensor>(data); }));
  return stages;
}

torch::Tensor run_stages(const std::vector<Stage>& stages, const torch::Tensor& data) {
  Tensors tensors = {data};
  for (const Stage& stage : stages) tensors = stage.forward(tensors);
  return tensors.at(0);
}

std::vector<torch::Tensor> parameters_of(const std::vector<Stage>& stages) {
  std::vector<torch::Tensor> parameters;
  std::unordered_set<const void*> seen;
  for (const Stage& stage : stages)
    for (const torch::nn::Module* module : stage.modules)
      for (const torch::Tensor& parameter : module->parameters())
        if (parameter.requires_grad() && seen.insert(parameter.unsafeGetTensorImpl()).second)
          parameters.push_back(parameter);
  return parameters;
}

}  // namespace lockstep
