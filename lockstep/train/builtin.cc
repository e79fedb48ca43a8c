// SPDX-License-Identifier: Apache-2.0
#include "lockstep/train/builtin.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <array>
#include <memory>
#include <optional>
#include <regex>
#include <utility>

#include <nlohmann/json.hpp>

#include "agent/clusters/environment.h"
#include "lockstep/base/log.h"
#include "lockstep/base/require.h"
#include "lockstep/base/text.h"
#include "lockstep/checkpoint/safetensors.h"
#include "lockstep/error.h"
#include "lockstep/memory.h"
#include "lockstep/model/parameters.h"

namespace lockstep {
namespace {

constexpr int64_t kSyntheticSamples = 1280;

bool takes_fashion_mnist(const SampleShape& sample) {
  return sample.sizes.empty() || (!sample.tokens && sample.sizes == std::vector<int64_t>{1, 28, 28});
}

// Random tokens, the same in every run.
Datasets synthetic_tokens(const SampleShape& sample) {
  const auto generator = at::make_generator<at::CPUGeneratorImpl>(1);
  const std::vector<int64_t> shape = {kSyntheticSamples, sample.sizes.front() + 1};
  const Tensor tokens = torch::randint(0, sample.classes, shape, generator, torch::kInt64);
  const Tensor data = tokens.slice(1, 0, -1).contiguous();
  const Tensor next = tokens.slice(1, 1).contiguous();
  return {.train = std::make_shared<TensorDataset>("synthetic", data, next), .validation = nullptr};
}

// Random samples of the shape that the task takes.
Datasets synthetic(DataSource source, const Task& task) {
  const SampleShape& sample = task.sample;
  require(!sample.sizes.empty(),
          concat("--data synthetic, but ", task.name, " does not say what its samples look like"),
          "set Task::sample, or give the shape: --data synthetic:1024x3x32x32");
  if (sample.tokens) return synthetic_tokens(sample);
  source.data = concat("synthetic:", kSyntheticSamples, "x", join(sample.sizes, "x"), "?classes=", sample.classes);
  return open_dataset(source);
}

// The samples of datasets, which have been opened for a task.
SampleShape shape_of(const Datasets& datasets, const Task& task) {
  const Batch first = first_sample(*datasets.train);
  if (!first.data.defined()) return task.sample;
  SampleShape found{.sizes = first.data.sizes().slice(1).vec(), .classes = datasets.train->classes()};
  if (datasets.validation) found.classes = std::max(found.classes, datasets.validation->classes());
  found.tokens = first.target.sizes() == first.data.sizes() && !first.data.is_floating_point();
  if (found.classes == 0 && first.target.is_floating_point()) found.numbers = first.target.numel();
  if (found.classes == 0 && found.numbers == 0) found.classes = task.sample.classes;
  return found;
}

}  // namespace

Batch first_sample(const Dataset& dataset) try {
  const std::array<int64_t, 1> first{0};
  return dataset.make_batch(first);
} catch (const DataError&) {
  return {};
}

Datasets load_datasets(DataSource source, const Task& task) {
  if (task.make_data) return task.make_data(source.folder);
  if (source.data == "auto") source.data = takes_fashion_mnist(task.sample) ? "fashion-mnist" : "synthetic";
  if (source.data == "synthetic") return synthetic(source, task);
  Datasets datasets = open_dataset(source);
  give_back_freed_memory();  // compressed files, as they were read
  return datasets;
}

namespace {

// Throws DataError where a target is no class of the model; what libtorch then says names no sample.
void require_classes(const Tensor& output, const Tensor& target) {
  if (output.dim() != target.dim() + 1 || !torch::isIntegralType(target.scalar_type(), false)) return;
  const bool classes_last = output.sizes().slice(0, target.dim()) == target.sizes();
  const int64_t classes = output.size(classes_last ? -1 : 1);
  constexpr int64_t kIgnored = -100;  // by torch's losses
  const Tensor is_wrong = (target != kIgnored).logical_and((target < 0).logical_or(target >= classes));
  if (!is_wrong.any().item<bool>()) return;
  const auto label = target.masked_select(is_wrong)[0].item<int64_t>();
  const auto sample = is_wrong.nonzero()[0][0].item<int64_t>();
  throw DataError({.what = concat("target ", label, " is not one of the model's ", classes, " classes"),
                   .here = concat("sample ", sample, " of the ", target.size(0), " of this rank's batch"),
                   .next = concat("give the model more outputs, or the data targets from 0 to ", classes - 1)});
}

// A built-in model's.
Task with_metrics(Task task) {
  constexpr int64_t kTop = 5;
  const SampleShape& sample = task.sample;
  if (sample.numbers > 0) task.metrics = {mean_absolute_error(), r_squared(sample.numbers)};
  if (sample.tokens || sample.classes == 0) return task;
  if (sample.classes > kTop) task.metrics.push_back(top_k_accuracy(kTop));
  task.metrics.push_back(confusion_matrix(sample.classes));
  return task;
}

}  // namespace

Task fitted_as(const Task& task, const SampleShape& sample) {
  if (sample == task.sample) return with_metrics(task);
  Task other = task.fit(sample);
  other.on_step = task.on_step;
  other.on_epoch = task.on_epoch;
  other.on_checkpoint = task.on_checkpoint;
  return with_metrics(std::move(other));
}

NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(SampleShape, sizes, classes, numbers, tokens)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(DataFacts, classes, columns, mean, deviation)

std::string to_text(const Fit& fit) { return nlohmann::json{{"sample", fit.sample}, {"data", fit.data}}.dump(); }

Fit fit_of(const std::string& text) {
  if (text.empty())
    throw CheckpointError({.what = "the checkpoint does not say which inputs its model takes",
                           .likely = "it was written by an older lockstep",
                           .next = "resume its training for a step, which writes another checkpoint"});
  const auto fit = nlohmann::json::parse(text);
  return {.sample = fit.at("sample"), .data = fit.at("data")};
}

Task fitted(const Task& task, const Datasets& datasets, int64_t classes) {
  require(classes == 0 || task.fit, concat("--classes with ", task.name, ", whose program sets its outputs"),
          "leave it out");
  if (task.make_data || (task.sample.sizes.empty() && !task.fit)) return task;
  SampleShape found = shape_of(datasets, task);
  if (classes > 0) found.classes = classes;
  if (task.fit) return fitted_as(task, found);
  require(found.sizes == task.sample.sizes,
          concat(task.name, " takes samples of shape ", torch::IntArrayRef(task.sample.sizes), ", but those of ",
                 datasets.train->name(), " have ", torch::IntArrayRef(found.sizes)),
          "--data synthetic makes samples that fit");
  return task;
}

Task with_named_targets(Task task) {
  task.loss = [loss = std::move(task.loss)](const Tensor& output, const Batch& batch) {
    try {
      return loss(output, batch);
    } catch (const c10::Error&) {
      require_classes(output, batch.target);
      throw;
    }
  };
  return task;
}

Task smoothed(Task task, double label_smoothing) {
  if (label_smoothing == 0) return task;
  auto* const loss = task.loss.target<CrossEntropy>();
  require(loss != nullptr, concat("--label-smoothing with ", task.name, ", whose loss is not CrossEntropy"),
          "leave it out, or set Task::loss to lockstep::CrossEntropy");
  loss->label_smoothing = label_smoothing;
  return task;
}

Task fitted_before_fork(const Task& task, const DataSource& source, int64_t classes) {
  const int threads = at::get_num_threads();
  at::set_num_threads(1);
  const std::shared_ptr<void> back(nullptr, [threads](void*) { at::set_num_threads(threads); });
  return fitted(task, load_datasets(source, task), classes);
}

// ---- --weights and --freeze

namespace {

// Names of GPT-2's layers here and in Hugging Face's files, which have their matrices as (in, out).
constexpr std::pair<std::string_view, std::string_view> kConv1D[] = {{".c_attn.", ".attn.c_attn."},
                                                                     {".attn_proj.", ".attn.c_proj."},
                                                                     {".c_fc.", ".mlp.c_fc."},
                                                                     {".mlp_proj.", ".mlp.c_proj."}};

// The tensor of the file that has this name there, perhaps within a model of its own name; nothing: there is none.
std::optional<Tensor> tensor_in(const CheckpointReader& file, const std::string& name) {
  for (const char* prefix : {"", "model.", "module.", "transformer."})
    if (file.entries().contains(prefix + name)) return file.read(prefix + name);
  return std::nullopt;
}

std::optional<Tensor> find_tensor(const CheckpointReader& file, const std::string& name) {
  for (const auto& [here, there] : kConv1D) {
    const size_t at = name.find(here);
    if (at == std::string::npos) continue;
    auto found = tensor_in(file, std::string(name).replace(at, here.size(), there));
    if (found) return found->dim() == 2 ? found->t() : *found;
  }
  return tensor_in(file, name);
}

// Returns the names of those that the file has not, or in another shape.
std::vector<std::string> load(const CheckpointReader& file, const NamedTensors& tensors) {
  const torch::NoGradGuard no_grad;
  std::vector<std::string> left;
  for (const auto& [name, tensor] : tensors) {
    const auto found = find_tensor(file, name);
    if (found && found->sizes() == tensor.sizes())
      Tensor(tensor).copy_(*found);
    else
      left.push_back(name);
  }
  return left;
}

void report(const std::string& file, size_t all, const std::vector<std::string>& left) {
  constexpr size_t kMostNames = 8;
  if (left.size() == all)
    throw UsageError({.what = concat(file, " has none of the model's ", all, " tensors in its shape"),
                      .next = "choose the --model that the file is for"});
  std::vector<std::string> names = left;
  if (names.size() > kMostNames) names.resize(kMostNames);
  log_info(concat(all - left.size(), " of the model's ", all, " tensors are from ", file,
                  left.empty() ? "" : concat("; it does not have, in their shape: ", join(names, ", ")),
                  names.size() < left.size() ? ", ..." : ""));
}

}  // namespace

Task with_weights(Task task, const std::string& file) {
  const auto reader = std::make_shared<const CheckpointReader>(file, Checksum::kOptional);
  task.make_model = [make = std::move(task.make_model), reader, file,
                     says = std::make_shared<bool>(read_job_environment().rank == 0)] {
    ModulePtr model = make();
    const auto tensors = named_tensors(*model);
    const auto left = load(*reader, tensors);
    if (left.size() == tensors.size() || std::exchange(*says, false)) report(file, tensors.size(), left);
    return model;
  };
  return task;
}

Task with_frozen(Task task, const std::string& pattern) {
  std::regex names;
  try {
    names = pattern;
  } catch (const std::regex_error&) {
    throw UsageError(
        {.what = concat("--freeze ", pattern, " is not a regular expression"), .next = "such as '^layer[12]'"});
  }
  task.make_model = [make = std::move(task.make_model), names, pattern] {
    ModulePtr model = make();
    const auto parameters = named_parameters(*model);
    size_t frozen = 0;
    for (const auto& [name, tensor] : parameters) {
      if (!std::regex_search(name, names)) continue;
      Tensor(tensor).set_requires_grad(false);
      ++frozen;
    }
    if (frozen > 0 && frozen < parameters.size()) return model;
    throw UsageError(
        {.what = concat("--freeze ", pattern, " matches ", frozen, " of ", parameters.size(), " parameters"),
         .here = concat("the first is ", parameters.front().name),
         .next = "match some of them, such as '^layer[12]'"});
  };
  return task;
}

}  // namespace lockstep
