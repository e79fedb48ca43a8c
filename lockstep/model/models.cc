// SPDX-License-Identifier: Apache-2.0
#include "lockstep/models.h"

#include "lockstep/base/names.h"

namespace lockstep {
namespace {

Task of_shape(Task task, SampleShape sample) {
  task.sample = std::move(sample);
  return task;
}

SampleShape grey_images() { return {.sizes = {1, 28, 28}, .classes = 10}; }
SampleShape large_images() { return {.sizes = {3, 224, 224}, .classes = 1000}; }
SampleShape small_images() { return {.sizes = {3, 32, 32}, .classes = 10}; }

template <class M, SampleShape (*sample)()>
Task images(const std::string& name) {
  return of_shape(classification_task<M>(name), sample());
}

Task wide_mlp(const std::string& name) {
  return of_shape(classification_task<MLP>(name, MLPOptions{.hidden = {4096, 4096}}), grey_images());
}

template <int layers, bool small = false>
Task resnet(const std::string& name) {
  const SampleShape sample = small ? small_images() : large_images();
  const ResNetOptions options{.layers = layers, .classes = sample.classes, .small_images = small};
  return of_shape(classification_task<ResNet>(name, options), sample);
}

Task gpt2(const std::string& name) { return gpt_task(name, {}); }
Task gpt_mini(const std::string& name) {
  return gpt_task(name, {.vocabulary = 256, .context = 128, .layers = 4, .heads = 4, .width = 128});
}

// Every model that --model knows. To add one, declare it in lockstep/models.h, write its source beside this one, and add a
// row; the help and the error for an unknown name list the names from here.
struct Entry {
  const char* name;
  Task (*make)(const std::string& name);
};
constexpr Entry kEntries[] = {
    {"lenet", images<LeNet, grey_images>},
    {"mlp", images<MLP, grey_images>},
    {"mlp-wide", wide_mlp},
    {"alexnet", images<AlexNet, large_images>},
    {"inception", images<Inception, large_images>},
    {"resnet18", resnet<18>},
    {"resnet34", resnet<34>},
    {"resnet50", resnet<50>},
    {"resnet18-32", resnet<18, true>},
    {"resnet34-32", resnet<34, true>},
    {"resnet50-32", resnet<50, true>},
    {"gpt2", gpt2},
    {"gpt-mini", gpt_mini},
};

}  // namespace

std::vector<std::string> model_names() { return names_in(kEntries); }

Task model_task(const std::string& name) { return row_named(kEntries, name, "--model").make(name); }

Task gpt_task(const std::string& name, const GPTOptions& options) {
  Task task = classification_task<GPT>(name, options);
  task.loss = [](const torch::Tensor& logits, const torch::Tensor& target) {
    return torch::cross_entropy_loss(logits.flatten(0, 1), target.flatten());
  };
  task.correct = [](const torch::Tensor& logits, const torch::Tensor& target) {
    return logits.argmax(2).eq(target).to(torch::kFloat64).mean(1).sum();
  };
  task.sample = {.sizes = {options.context}, .classes = options.vocabulary, .tokens = true};
  return task;
}

}  // namespace lockstep
