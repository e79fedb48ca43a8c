// SPDX-License-Identifier: Apache-2.0
#include "lockstep/models.h"

#include <algorithm>
#include <array>
#include <filesystem>

#include "lockstep/base/names.h"
#include "lockstep/base/text.h"
#include "lockstep/script_module.h"

namespace lockstep {
namespace {

UsageError misfit(const std::string& model, const std::string& takes, const SampleShape& found) {
  const std::string target =
      found.numbers > 0 ? concat(found.numbers, " numbers to predict") : concat(found.classes, " classes");
  return UsageError({.what = concat(model, " takes ", takes, ", but samples have ",
                                    found.tokens ? "whole numbers of shape " : "shape ",
                                    torch::IntArrayRef(found.sizes), " and ", target),
                     .next = "choose another --model: mlp takes numbers of any shape, gpt-mini takes tokens"});
}

void require_images(const std::string& model, const SampleShape& found, int64_t channels, int64_t least) {
  const auto& sizes = found.sizes;
  const bool fits = !found.tokens && found.classes > 0 && sizes.size() == 3 && (channels == 0 || sizes[0] == channels);
  if (fits && std::min(sizes[1], sizes[2]) >= least) return;
  throw misfit(model,
               concat(channels == 3 ? "colour " : "", "images (", channels == 0 ? "C" : "3", ", H, W) of at least ",
                      least, " x ", least, " in classes"),
               found);
}

Task lenet(const std::string& name, const SampleShape& sample) {
  require_images(name, sample, 0, 14);
  const auto& sizes = sample.sizes;
  return classification_task<LeNet>(
      name, LeNetOptions{.channels = sizes[0], .height = sizes[1], .width = sizes[2], .classes = sample.classes});
}

// Of numbers to predict.
Tensor mean_squared_error(const Tensor& output, const Tensor& target) {
  return torch::mse_loss(output, target.view_as(output));
}

template <int64_t width>
Task mlp(const std::string& name, const SampleShape& sample) {
  constexpr int64_t kMostClasses = 1'000'000;
  if (sample.tokens) throw misfit(name, "floating-point numbers", sample);
  if (sample.classes > kMostClasses)
    throw UsageError({.what = concat("targets up to ", sample.classes - 1, " as classes"),
                      .likely = "a column of quantities, not of classes",
                      .next = "csv:FILE?numbers=1 predicts them as numbers; or give --classes"});
  Task task =
      classification_task<MLP>(name, MLPOptions{.inputs = c10::multiply_integers(sample.sizes),
                                                .hidden = {width, width},
                                                .outputs = sample.numbers > 0 ? sample.numbers : sample.classes});
  if (sample.numbers == 0) return task;
  task.loss = mean_squared_error;
  task.correct = nullptr;
  return task;
}

template <class M, class Options, int64_t least>
Task colour_images(const std::string& name, const SampleShape& sample) {
  require_images(name, sample, 3, least);
  return classification_task<M>(name, Options{.classes = sample.classes});
}

template <int layers, bool small = false>
Task resnet(const std::string& name, const SampleShape& sample) {
  require_images(name, sample, 3, small ? 8 : 32);
  return classification_task<ResNet>(name,
                                     ResNetOptions{.layers = layers, .classes = sample.classes, .small_images = small});
}

// The published numbers of tokens and positions, or more where the data needs them.
Task gpt(const std::string& name, const SampleShape& sample, GPTOptions options) {
  if (!sample.tokens || sample.sizes.size() != 1) throw misfit(name, "tokens", sample);
  options.vocabulary = std::max(options.vocabulary, sample.classes);
  options.context = std::max(options.context, sample.sizes[0]);
  Task task = gpt_task(name, options);
  task.sample.sizes = sample.sizes;
  return task;
}
Task gpt2(const std::string& name, const SampleShape& sample) { return gpt(name, sample, {}); }
template <int64_t layers, int64_t width>
Task gpt_of_bytes(const std::string& name, const SampleShape& sample) {
  return gpt(name, sample, {.vocabulary = 256, .context = 128, .layers = layers, .heads = layers, .width = width});
}

constexpr std::array<int64_t, 3> kGreyImages{1, 28, 28}, kLargeImages{3, 224, 224}, kSmallImages{3, 32, 32};

// Every model that --model knows. To add one, declare it in lockstep/models.h, write its source beside this one, and add a
// row; the help and the error for an unknown name list the names from here.
struct Entry {
  const char* name;
  Task (*make)(const std::string& name, const SampleShape& sample);
  std::span<const int64_t> sizes;  // of the published samples, and their classes
  int64_t classes;
  bool tokens = false;
};
constexpr std::array<int64_t, 1> kGPT2Block{1024}, kGPTMiniBlock{128};
constexpr Entry kEntries[] = {
    {"lenet", lenet, kGreyImages, 10},
    {"mlp", mlp<512>, kGreyImages, 10},
    {"mlp-wide", mlp<4096>, kGreyImages, 10},
    {"alexnet", colour_images<AlexNet, AlexNetOptions, 63>, kLargeImages, 1000},
    {"inception", colour_images<Inception, InceptionOptions, 15>, kLargeImages, 1000},
    {"resnet18", resnet<18>, kLargeImages, 1000},
    {"resnet34", resnet<34>, kLargeImages, 1000},
    {"resnet50", resnet<50>, kLargeImages, 1000},
    {"resnet18-32", resnet<18, true>, kSmallImages, 10},
    {"resnet34-32", resnet<34, true>, kSmallImages, 10},
    {"resnet50-32", resnet<50, true>, kSmallImages, 10},
    {"gpt2", gpt2, kGPT2Block, 50257, true},
    {"gpt-mini", gpt_of_bytes<4, 128>, kGPTMiniBlock, 256, true},
    {"gpt-char", gpt_of_bytes<6, 384>, kGPTMiniBlock, 256, true},
};

Task make_task(const Entry& entry, const SampleShape& sample) {
  Task task = entry.make(entry.name, sample);
  if (!sample.tokens) task.sample = sample;
  task.fit = [&entry](const SampleShape& other) { return make_task(entry, other); };
  return task;
}

}  // namespace

std::vector<std::string> model_names() { return names_in(kEntries); }

Task model_task(const std::string& name) {
  if (name.ends_with(".pt")) return script_task(name);
  const Entry& entry = row_named(kEntries, name, "--model");
  return make_task(
      entry, {.sizes = {entry.sizes.begin(), entry.sizes.end()}, .classes = entry.classes, .tokens = entry.tokens});
}

// Takes the loss that the targets ask for.
Task script_task(const std::string& file) {
  Task task;
  task.make_model = [file] { return ScriptModule(file).ptr(); };
  task.forward = call_forward<ScriptModuleImpl>;
  task.loss = CrossEntropy{.classes_last = true};
  task.name = std::filesystem::path(file).stem();
  task.fit = [file](const SampleShape& sample) {
    Task fitted = script_task(file);
    fitted.sample = sample;
    if (sample.numbers > 0) {
      fitted.loss = mean_squared_error;
      return fitted;
    }
    fitted.correct = [](const Tensor& output, const Tensor& target) {
      return output.argmax(-1).eq(target).to(torch::kFloat64).flatten().sum() * target.size(0) / target.numel();
    };
    return fitted;
  };
  return task;
}

Task gpt_task(const std::string& name, const GPTOptions& options) {
  Task task = classification_task<GPT>(name, options);
  task.loss = CrossEntropy{.classes_last = true};
  task.correct = [](const Tensor& logits, const Tensor& target) {
    return logits.argmax(2).eq(target).to(torch::kFloat64).mean(1).sum();
  };
  task.sample = {.sizes = {options.context}, .classes = options.vocabulary, .tokens = true};
  return task;
}

}  // namespace lockstep
