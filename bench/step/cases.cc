// SPDX-License-Identifier: Apache-2.0
#include "bench/step/cases.h"

#include <torch/types.h>

#include "lockstep/models.h"

namespace lockstep::bench {
namespace {

constexpr std::int64_t kTokens = 128;
constexpr std::int64_t kVocabulary = 256;

}  // namespace

const std::vector<StepCase>& step_cases() {
  static const std::vector<StepCase> cases{
      {"lenet", 256, "channels_last"},       // 0.13 M parameters
      {"mlp", 32, "contiguous"},             // 25.1 M
      {"alexnet", 8, "channels_last"},       // 61.1 M
      {"resnet18-32", 64, "channels_last"},  // 11.2 M
      {"gpt", 8, "contiguous"},              // 10.8 M
  };
  return cases;
}

Task task_of(const StepCase& one) {
  if (one.name == "mlp")
    return classification_task<MLP>("mlp", MLPOptions{.inputs = 1024, .hidden = {4096, 4096}, .outputs = 1000});
  if (one.name == "gpt")
    return gpt_task(
        "gpt", {.vocabulary = kVocabulary, .context = kTokens, .layers = 6, .heads = 6, .width = 384, .dropout = 0});
  return model_task(one.name);
}

Batch random_batch(const StepCase& one, std::int64_t size) {
  torch::manual_seed(1);
  if (one.name == "gpt")
    return {torch::randint(kVocabulary, {size, kTokens}, torch::kInt64),
            torch::randint(kVocabulary, {size, kTokens}, torch::kInt64)};
  std::vector<std::int64_t> shape{size, 3, 32, 32};
  if (one.name == "lenet") shape = {size, 1, 28, 28};
  if (one.name == "mlp") shape = {size, 1024};
  if (one.name == "alexnet") shape = {size, 3, 224, 224};
  const std::int64_t classes = one.name == "mlp" || one.name == "alexnet" ? 1000 : 10;
  return {torch::randn(shape), torch::randint(classes, {size}, torch::kInt64)};
}

}  // namespace lockstep::bench
